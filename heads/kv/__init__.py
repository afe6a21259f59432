"""Keys and values of rows of different lengths: stores, the target's cache, a drafter's caches, and the layers and models that use them."""
