"""The libraries LayerZero can call: one folder each, with `capabilities.json` and `adapter.py`."""

BACKENDS: tuple[str, ...] = (
    "torch",
    "torch_cuda",
    "triton",
    "onednn",
    "zentorch",
    "ipex",
)
"""Folder names, in the order in which they are looked at."""

UNPROVEN: tuple[str, ...] = (
    "flash_attn",
    "flash_attn_3",
    "flash_attn_4",
    "flashinfer",
    "xformers",
)
"""Folders that are not loaded: their adapters were tried with recording fakes of the libraries, not yet on hardware. One
that has been moves up."""
