"""The backbone's own answers to a dataset's prompts."""
