"""A run of checkpoints: when to save, what to keep, where to resume, which job owns it."""
