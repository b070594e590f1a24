"""Real frameworks, saving to a real server. A file whose framework is not installed is skipped."""
