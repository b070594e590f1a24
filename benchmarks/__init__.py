"""Benchmarks of dcp_objstore and its peers: `python -m benchmarks --help`."""
