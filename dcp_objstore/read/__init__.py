"""Load a checkpoint: the reader, which bytes are needed, and one load from start to end."""
