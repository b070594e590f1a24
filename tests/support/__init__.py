"""What the tests share: stores to run against, rank processes, seeded states."""
