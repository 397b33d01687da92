"""The libraries LayerZero can call: one folder each, with `capabilities.json` and `adapter.py`."""

BACKENDS: tuple[str, ...] = (
    "torch",
    "onednn",
    "zentorch",
    "ipex",
)
"""Folder names, in the order in which they are looked at."""
