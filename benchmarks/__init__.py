"""Benchmarks of dcp_objstore beside its peers: `python -m benchmarks --help`."""
