"""FlashInfer's kernels for many queries."""
