"""What `lz.optimize` does to a model: operations in the place of modules, and whole steps as CUDA graphs."""
