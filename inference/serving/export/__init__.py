"""`headstart export`: heads in the layout of a serving engine, checked and written as a whole."""
