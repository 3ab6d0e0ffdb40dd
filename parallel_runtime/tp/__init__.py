"""Tensor parallelism: heads, feed-forward width and vocabulary are cut over tp; activations between layers are whole."""
