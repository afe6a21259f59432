"""HTML reports and tables on a terminal."""
