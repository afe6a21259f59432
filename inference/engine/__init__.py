"""What one decoding step is made of: request, sequences, candidate tree, forward pass, verification, cache."""
