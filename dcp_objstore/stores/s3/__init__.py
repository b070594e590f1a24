"""What every transport to S3 does alike."""
