"""FlashAttention 4, written in the CuTe DSL."""
