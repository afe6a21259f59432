"""What a recipe will need, before it needs it."""
