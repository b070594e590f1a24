"""Tests of `dcp_objstore.distributed`."""
