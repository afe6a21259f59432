"""The choice of sources and tree size for each decoding step, and the results of `headstart tune`."""
