"""A training run: per-drafter trainers, optimizer, schedule, checkpoints, processes, log."""
