"""The training objective: loss terms, depth weights, and their sum without ``[T, V]`` logits."""
