"""What a child can compile, and what it is to be told for that.

- A backend whose package names a module ``AHEAD`` is compiled without a device: the module's ``launches`` says what a call
  needs, its ``compile`` compiles that in the child. No context is made, and no memory of the GPU is taken. Our own
  Triton kernels are compiled so.
- Others are run once in the child, on inputs made up for the call. On a GPU that makes a context, some 500 MB; it is done
  for libraries that keep what they compile on disk, where the GPU has room for it.
- The rest is compiled by this process: kernels that the program registered itself, which a child does not have, and those
  of libraries that keep nothing. cuDNN's plans belong to a context, so each process makes its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from layerzero import _native, backend_files, devices, disk_caches, kernel_runs, loading

#: What a child's context and library take of a GPU's memory, with room to spare.
_CONTEXT_BYTES = 4 << 30
#: How many times the tensors of a call a run of it takes: inputs, copies of those that are updated, results, workspace.
_SHARE = 3
#: Shorter than this, nothing was compiled.
_COMPILED_MS = 200.0

#: Backends of which a child was found to compile in vain.
_in_vain: set[str] = set()


def can(kernel: str, call: str, device: int) -> bool:
    """Whether a child can compile a kernel so that this process finds it compiled."""
    backend = loading.brought(kernel)
    if backend is None or backend in _in_vain:
        return False
    kind = _native.device_name(device).partition(":")[0]
    if kind != "cuda":
        return kind == "cpu"
    if _ahead(backend) is not None:
        return True
    return disk_caches.of_backend(backend) is not None and _has_room(call, device)


def is_ahead(kernel: str, device: int) -> bool:
    """Whether a child compiles a kernel without running it."""
    backend = loading.brought(kernel)
    return backend is not None and _ahead(backend) is not None and devices.cuda_index(device) is not None


def job(kernel: str, call: str, device: int) -> dict[str, Any] | None:
    """What the child is told; ``None`` where there is nothing left to compile."""
    module, index = _ahead(loading.brought(kernel) or ""), devices.cuda_index(device)
    if module is None or index is None:
        return {"call": call, "device": _native.device_name(device)}
    from layerzero.tuning import inputs

    with kernel_runs.quietly(device):
        made = inputs.make(call, device)
        subject = _native.Subject(made.function, made.drawn_apart())
        needed = import_module(module).launches(lambda: subject.run(kernel), index)
    return {"ahead": [module, needed]} if needed and needed["launches"] else None


def together(jobs: Iterable[tuple[str, str, int]]) -> dict[str, Any] | None:
    """What the child is told to compile several kernels at once, given as kernel, call and device: those that it compiles ahead
    in the same way. ``None`` where that is not more than one."""
    needed: dict[str, list[Any]] = {}
    for kernel, call, device in jobs:
        if is_ahead(kernel, device) and (told := job(kernel, call, device)) is not None:
            module, one = told["ahead"]
            needed.setdefault(module, []).append(one)
    for module, every in needed.items():
        if len(every) > 1 and (whole := import_module(module).merged(every)) is not None:
            return {"ahead": [module, whole]}
    return None


def came_out(kernel: str, elsewhere_ms: float, here_ms: float) -> None:
    """Takes note of how long a kernel took in the child, and then here: one that took as long again was compiled twice, and
    its backend keeps nothing on disk."""
    backend = loading.brought(kernel)
    twice = elsewhere_ms > 0.0 and here_ms > max(_COMPILED_MS, elsewhere_ms / 2)
    if twice and backend is not None and disk_caches.of_backend(backend) is None:
        _in_vain.add(backend)


def _ahead(backend: str) -> str | None:
    from layerzero.backends import BACKENDS

    if backend not in BACKENDS:
        return None
    return getattr(import_module(backend_files.package(backend)), "AHEAD", None)


def _has_room(call: str, device: int) -> bool:
    """Whether the GPU has room for a context and the call's tensors once more, beside what this process holds."""
    import torch

    sizes = 0
    for tensor in json.loads(call).get("tensors", {}).values():
        # The widest dtype there is, to be on the safe side.
        sizes += math.prod(tensor["shape"]) * getattr(getattr(torch, tensor["dtype"], None), "itemsize", 8)
    free, _ = torch.cuda.mem_get_info(devices.cuda_index(device))
    return bool(free >= _CONTEXT_BYTES + _SHARE * sizes)
