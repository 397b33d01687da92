"""FlashAttention 2."""
