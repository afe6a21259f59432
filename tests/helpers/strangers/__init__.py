"""Drafters as a user of the project would write them: one file each, found by their dotted names."""
