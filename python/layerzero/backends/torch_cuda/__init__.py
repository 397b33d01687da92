"""PyTorch on NVIDIA GPUs."""
