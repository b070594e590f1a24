"""The transport `boto3`: s3:// over boto3."""
