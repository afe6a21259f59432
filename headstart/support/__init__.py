"""Utilities used by all packages: errors, files, configuration, token text, reports."""
