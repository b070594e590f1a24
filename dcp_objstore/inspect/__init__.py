"""Look into a checkpoint without loading it: entries, single tensors, verification."""
