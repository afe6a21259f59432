"""``headstart inspect``: what a recipe or a checkpoint holds."""
