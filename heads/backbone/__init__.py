"""The frozen model that heads are trained on, seen through the few things heads and the decoder need of it."""
