"""Where candidates come from: trained heads, n-grams, token recycling, a draft model, early exit."""
