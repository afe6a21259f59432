"""Building blocks of heads: decoder layer, attention, KV caches."""
