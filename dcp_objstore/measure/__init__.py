"""Measure saves and loads on the user's own store and machine."""
