"""What a wheel was built for, where its version says so: `2.8.3+cu12torch2.8cxx11abiTRUE`."""

import re

import torch


def check_build(library: str, version: str) -> None:
    """Raises `RuntimeError` when the wheel was built for another major version of CUDA than torch."""
    built = re.search(r"\+.*?cu(\d\d)", version)
    here = (torch.version.cuda or "").partition(".")[0]
    if built and here and built[1] != here:
        raise RuntimeError(
            f"{library} {version} was built for CUDA {built[1]}, torch {torch.__version__} for CUDA {here}"
        )
