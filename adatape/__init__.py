"""AdaTape: adaptive tape tokens read from a bank into a transformer."""
