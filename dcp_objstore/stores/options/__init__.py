"""`storage_options`: which there are, what they must be, and what they mean."""
