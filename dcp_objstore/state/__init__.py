"""Convert between a state dict and the bytes of its tensors."""
