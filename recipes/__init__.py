"""Recipes: one YAML a run, by family, and the embedded backbone (package data)."""
