"""Sources of drafts: trained heads, n-grams, token recycling, a draft model, early exit."""
