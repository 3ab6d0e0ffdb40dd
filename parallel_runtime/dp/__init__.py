"""Data parallelism: every rank has the model and a part of the batch; gradients are summed over dp in buckets."""
