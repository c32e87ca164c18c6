"""The adaptive engine: stages, compaction between them, monitoring."""
