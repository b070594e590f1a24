"""For a diagnosis: whose credentials a store is asked with, and what its server answers."""
