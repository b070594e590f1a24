"""Checkpoints of stock torch and others, in and out. Nothing of theirs is executed."""
