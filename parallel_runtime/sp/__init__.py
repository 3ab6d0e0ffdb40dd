"""Sequence parallelism inside tp: what lies between the cut matrices (norms, dropout, residuals) is cut by positions."""
