"""Process groups, and errors on which all ranks agree."""
