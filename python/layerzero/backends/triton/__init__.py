"""Kernels of our own, written in Triton."""
