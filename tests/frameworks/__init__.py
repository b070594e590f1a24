"""Real frameworks, saving to a real server. A file is skipped without its framework."""
