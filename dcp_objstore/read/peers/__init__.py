"""Read once: ranks that need the same bytes share what one of them fetched."""
