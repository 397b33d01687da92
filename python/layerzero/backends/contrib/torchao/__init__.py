"""torchao, PyTorch's library for quantization."""
