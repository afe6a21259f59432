"""What is learned from: rows, conversations, samples with their loss mask, packed rows, the order they come in."""
