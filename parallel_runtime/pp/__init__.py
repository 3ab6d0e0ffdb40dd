"""Pipeline parallelism: the model is cut into stages of layers; a table says which microbatch each computes next."""
