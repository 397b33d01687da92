"""Which of the two implementations a flash-attn for ROCm calls: Composable Kernel, or Triton where the environment variable
FLASH_ATTENTION_TRITON_AMD_ENABLE is TRUE."""

import sys

import torch

from .library import Library

library = Library("flash_attn.flash_attn_interface", "flash_attn_func")


def find(triton: bool) -> str:
    """The version of flash-attn; raises `ImportError` where it is missing or of the other kind."""
    if torch.version.hip is None:
        raise ImportError(f"torch {torch.__version__} was built without ROCm")
    version = library.find()
    interface = sys.modules[library.name]
    if bool(getattr(interface, "USE_TRITON_ROCM", False)) is not triton:
        kind = "Composable Kernel" if triton else "Triton"
        raise ImportError(f"this flash_attn calls {kind}; FLASH_ATTENTION_TRITON_AMD_ENABLE chooses")
    return version
