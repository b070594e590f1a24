"""Real frameworks and a real server. A file is skipped where its framework is not installed."""
