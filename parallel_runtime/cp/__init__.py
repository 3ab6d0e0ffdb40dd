"""Context parallelism: the sequence is cut, attention included."""
