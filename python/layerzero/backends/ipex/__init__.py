"""Intel Extension for PyTorch."""
