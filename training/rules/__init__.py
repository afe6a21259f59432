"""Recipes by rule: the values that suit a model, from its configuration, and a recipe's text."""
