"""What a recipe needs in memory, disk and time, before it is trained."""
