"""Sources of drafts: trained heads, n-grams, token recycling, early exit."""
