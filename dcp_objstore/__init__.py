"""torch.distributed.checkpoint straight to S3, GCS and any other object store."""
