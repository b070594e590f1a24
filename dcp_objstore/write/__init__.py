"""Save a checkpoint: the writer, the layout of items in objects, and one save from start to end."""
