"""PyTorch on any device it has."""
