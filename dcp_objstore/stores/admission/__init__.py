"""How many requests a process sends to a bucket, and how fast, while the store throttles."""
