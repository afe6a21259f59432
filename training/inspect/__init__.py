"""``headstart inspect``: show the contents of a recipe or checkpoint."""
