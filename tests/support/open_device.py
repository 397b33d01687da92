"""A device torch has by a backend of another vendor: `moon`, made of host memory (open_device.cpp).

`library` compiles it; `open_up` has this process's torch know it. It stays: do that in a process of its own.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import types
from pathlib import Path

import torch

NAME = "moon"
SOURCE = Path(__file__).with_suffix(".cpp")


def library() -> Path:
    """The compiled backend; raises `RuntimeError` where there is no compiler, or it does not take torch's headers."""
    root = Path(torch.__file__).parent
    made_of = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"layerzero-open-device-{made_of}.so"
    if built.exists():
        return built
    headers = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    part = built.with_suffix(f".{os.getpid()}")
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", *headers, str(SOURCE), "-o", str(part)]
    try:
        done = subprocess.run(
            [*command, f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise RuntimeError(f"there is no compiler: {error}") from error
    if done.returncode:
        raise RuntimeError(f"the backend cannot be compiled: {done.stderr[-400:]}")
    part.rename(built)
    return built


def open_up(built: Path) -> None:
    """Has torch know the device: two of them, the second in use."""
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(NAME)
    module.__dict__.update(
        is_available=lambda: True,
        device_count=lambda: 2,
        current_device=lambda: 1,
        get_device_name=lambda index: f"Moon {index}",
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
    )
    torch._register_device_module(NAME, module)
    torch.ops.load_library(str(built))
