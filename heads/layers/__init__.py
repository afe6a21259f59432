"""Building blocks of heads: decoder layers, attention, and KV caches of rows of different lengths."""
