"""FlashAttention 4 over pages."""
