"""Unfinished multipart uploads, and what the bucket does with them by itself."""
