"""Estimate the memory, disk and time that training needs."""
