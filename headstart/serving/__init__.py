"""Heads for serving engines: export to their layouts, import from other trainers' files, verification of drafts, publication."""
