"""How drafts are grown, picked and kept; measuring; the commands."""
