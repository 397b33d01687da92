"""AITER, AMD's kernels for Instinct GPUs."""
