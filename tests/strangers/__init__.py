"""Drafters as a stranger to the project would write them: one file each, found by their dotted names."""
