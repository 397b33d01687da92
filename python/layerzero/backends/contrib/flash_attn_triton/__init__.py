"""FlashAttention 2 for ROCm, built on Triton."""
