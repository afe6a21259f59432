"""Drafters: the interface, its backbone and layers, and one file per method."""
