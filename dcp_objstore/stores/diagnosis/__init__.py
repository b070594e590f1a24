"""What a diagnosis asks of a store: who we are there, and what its server says."""
