"""Compares captured passes with uncaptured ones before a model writes its first captured text."""
