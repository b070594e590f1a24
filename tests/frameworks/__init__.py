"""Real frameworks, saving to a real server. Each file is skipped where its framework is not installed."""
