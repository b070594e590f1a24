"""Moving bytes: pure planning of parts and ranges, bounded upload and download, digests.

Knows stores and buffers; knows nothing of tensors or checkpoints.
"""
