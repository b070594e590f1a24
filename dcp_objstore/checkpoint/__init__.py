"""What a checkpoint is: object names, the index, the marker and the rules of committing it."""
