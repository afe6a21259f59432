"""What a run reports: log lines, evaluation, trackers, HTML."""
