"""EAT: BERT that prunes tokens, attends in windows and exits early."""
