"""Layers that heads are made of: decoder layer, attention, caches."""
