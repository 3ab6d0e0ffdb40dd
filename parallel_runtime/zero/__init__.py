"""ZeRO and fully sharded data parallelism: the model state is cut over the ranks that hold equal copies of it."""
