"""Forward passes captured once and replayed without Python's overhead."""
