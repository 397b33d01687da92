"""Which of the two implementations a flash-attn for ROCm calls: Composable Kernel, or Triton where the environment variable
FLASH_ATTENTION_TRITON_AMD_ENABLE is TRUE."""

from importlib import import_module, metadata
from typing import Any

import torch


def find(triton: bool) -> tuple[str, Any]:
    """The version of flash-attn and its function; raises `ImportError` where it is missing or of the other kind."""
    if torch.version.hip is None:
        raise ImportError(f"torch {torch.__version__} was built without ROCm")
    try:
        version = metadata.version("flash_attn")
        interface = import_module("flash_attn.flash_attn_interface")
    except metadata.PackageNotFoundError as error:
        raise ImportError("flash_attn is not installed") from error
    except ImportError as error:
        raise ImportError(f"flash_attn cannot be imported: {' '.join(str(error).split())}") from error
    if bool(getattr(interface, "USE_TRITON_ROCM", False)) is not triton:
        kind = "Composable Kernel" if triton else "Triton"
        raise ImportError(f"this flash_attn calls {kind}; FLASH_ATTENTION_TRITON_AMD_ENABLE chooses")
    return version, interface.flash_attn_func
