"""Crash at every request: saves, deletions, sweeps and repairs are cut off, and the rest judged.

python -m tests.crash          the table, of this library and of stock torch's FsspecWriter
python -m tests.crash --all    also the large variants that the default test run leaves out
python -m tests.crash --ceph   on Ceph's gateway, which it starts
"""
