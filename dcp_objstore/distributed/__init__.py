"""Process groups, and errors that all ranks agree on."""
