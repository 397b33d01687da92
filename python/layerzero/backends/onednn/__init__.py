"""oneDNN, as PyTorch exposes it."""
