"""Drafting without training: from the text so far and from what the backbone has said of it."""
