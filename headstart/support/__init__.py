"""What every layer uses and none owns: errors, files, text of tokens, reports."""
