"""Hidden states of the backbone: computed live or cached on disk."""
