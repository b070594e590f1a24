"""All that is known of Azure."""
