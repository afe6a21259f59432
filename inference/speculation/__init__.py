"""The choice of sources and tree size for each decoding step."""
