"""Moving bytes: the planning of parts and ranges, bounded uploads and downloads, and digests.

This folder knows stores and buffers, but not tensors or checkpoints.
"""
