"""PyTorch on Intel GPUs."""
