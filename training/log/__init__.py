"""Reporting of a training run: log, evaluation, trackers, HTML report."""
