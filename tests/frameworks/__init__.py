"""Real frameworks, saving to a real server. A file is skipped where its framework is missing."""
