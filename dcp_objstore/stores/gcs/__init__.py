"""All that is known of GCS."""
