"""Copies of data objects on this node, written during an upload and read instead of the store."""
