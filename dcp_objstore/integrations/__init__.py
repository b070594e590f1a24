"""Frameworks and torch's own storage classes, made to save and load with this library."""
