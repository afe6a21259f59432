"""HTML reports: charts, markup, style."""
