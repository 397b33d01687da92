"""Kernels of our own, written in Triton."""

AHEAD = "layerzero.backends.triton.ahead"
"""What compiles them without a device."""


def check() -> None:
    """Raises `RuntimeError` where torch sees no device Triton compiles for: then Triton is not imported."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        raise RuntimeError("Triton compiles for CUDA devices, and torch sees none")
