"""What a drafter is trained for: terms, weights of depths, and their sum without ``[T, V]`` anywhere."""
