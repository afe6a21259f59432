"""A run, written down: YAML, sections, overrides, several heads."""
