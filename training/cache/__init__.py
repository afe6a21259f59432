"""The backbone's reading on disk."""
