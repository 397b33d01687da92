"""Intel Extension for PyTorch on Intel GPUs."""
