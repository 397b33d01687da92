"""Kernels of the Hugging Face hub: how the backends `hub_…` are loaded."""
