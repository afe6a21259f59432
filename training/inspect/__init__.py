"""What a recipe or a checkpoint holds, shown."""
