"""Read and write checkpoints of stock torch and others; nothing in them is executed."""
