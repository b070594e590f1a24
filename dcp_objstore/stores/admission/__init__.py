"""Admission: the number and rate of a process's requests to a bucket that throttles."""
