"""Intel Extension for PyTorch."""

DISTRIBUTION = "intel_extension_for_pytorch"


def check() -> None:
    """Raises `ImportError` under another torch than the extension was made for: importing it then prints an error and
    fails in a way that depends on the release."""
    from importlib import metadata

    import torch

    version = metadata.version(DISTRIBUTION)
    if version.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ImportError(f"{DISTRIBUTION} {version} needs torch of the same minor version, found {torch.__version__}")
