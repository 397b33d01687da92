"""PyTorch on the CPU."""
