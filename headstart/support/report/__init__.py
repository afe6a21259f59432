"""HTML reports and terminal tables."""
