"""Copies of data objects on this node, written beside an upload and read instead of the store."""
