"""A backend for LayerZero that comes as a package of its own."""

from __future__ import annotations

from pathlib import Path


def register_backend() -> None:
    """Registers the kernels with LayerZero. Installing the package is enough: an entry point names this function."""
    import layerzero as lz

    # Imported here and not above: the package can be imported, and asked what it is, without torch.
    from lz_example_plugin import adapter

    document = Path(__file__).with_name("capabilities.json")
    lz.register_backend(document, adapter.KERNELS, version=adapter.detect())
