"""Read once: one rank fetches bytes that several ranks need and shares them."""
