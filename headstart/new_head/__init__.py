"""What ``headstart new-head`` copies: a working head, its recipe and its test."""
