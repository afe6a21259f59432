"""The commands of inference: arguments, files, what they print."""
