"""Expert parallelism: the experts of a layer are cut over ranks; tokens travel to them and back."""
