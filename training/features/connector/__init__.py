"""What vLLM loads."""
