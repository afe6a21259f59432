"""One training run: trainer per drafter, optimizer, schedule, checkpoints, sharding."""
