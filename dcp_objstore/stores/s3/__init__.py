"""The parts that all transports to S3 share."""
