"""Regenerate the responses of a dataset with the backbone."""
