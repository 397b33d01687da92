"""PyTorch on AMD GPUs."""
