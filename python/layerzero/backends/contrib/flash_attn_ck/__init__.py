"""FlashAttention 2 for ROCm, built on Composable Kernel."""
