"""The function ``apply_rotary_pos_emb`` of modeling files, replaced by `lz.rope` while a model wants it.

It is a function of the file, not of a model: every model of that file gets it. The new one computes the same, and calls
the old one for whatever it was not compared on. Each file counts how many models want it; the last one that no longer
does brings the old function back.
"""

from __future__ import annotations

import inspect
import sys
import threading
from dataclasses import dataclass
from typing import Any

import torch

from layerzero._native import rope
from layerzero.integrations.models.replacing import close

__all__ = ["files_of", "release", "take"]

NAME = "apply_rotary_pos_emb"


@dataclass
class _Taken:
    theirs: Any
    ours: Any
    models: int


_LOCK = threading.Lock()
_taken: dict[str, _Taken] = {}


def files_of(model: torch.nn.Module) -> list[str]:
    """The modeling files of a model's modules that have such a function."""
    names = {type(module).__module__: None for module in model.modules()}
    return [name for name in names if callable(getattr(sys.modules.get(name), NAME, None))]


def take(file: str, dtype: torch.dtype, device: Any) -> str | None:
    """Replaces the function of a file for one more model. Returns why not, where it computes something else."""
    module = sys.modules[file]
    with _LOCK:
        if (taken := _taken.get(file)) is not None:
            taken.models += 1
            return None
        theirs = getattr(module, NAME)
        names = list(inspect.signature(theirs).parameters)[:4]
        if names[:1] != ["q"] or names[1:2] != ["k"] or names[2:] != ["cos", "sin"]:
            return f"its arguments are {', '.join(names)}, not q, k, cos, sin"
        for interleaved, times in ((False, 1), (True, 1), (False, 2)):
            ours = _rotated(theirs, interleaved, times)
            if _same(theirs, ours, times, dtype, device):
                setattr(module, NAME, ours)
                _taken[file] = _Taken(theirs, ours, 1)
                return None
    return "computes something else than lz.rope"


def release(file: str) -> None:
    """One model less wants the function of a file."""
    with _LOCK:
        taken = _taken[file]
        taken.models -= 1
        if taken.models:
            return
        del _taken[file]
        # Somebody else may have replaced it since.
        if getattr(sys.modules[file], NAME, None) is taken.ours:
            setattr(sys.modules[file], NAME, taken.theirs)


def _rotated(theirs: Any, interleaved: bool, times: int) -> Any:
    """The function by `lz.rope`. A head is ``times`` as wide as the tables."""

    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, *rest: Any, **named: Any) -> Any:
        if rest or named or cos.dim() != 3 or q.dim() != 4 or k.dim() != 4 or cos.dtype is not q.dtype:
            return theirs(q, k, cos, sin, *rest, **named)
        batch, length, width = cos.shape
        if width * times != q.shape[3] or width * times != k.shape[3] or length != q.shape[2] or length != k.shape[2]:
            return theirs(q, k, cos, sin)
        if batch == 1:
            cos, sin, positions = cos[0], sin[0], None
        else:
            # One table of all rows, and which of them each sequence uses.
            cos, sin = cos.reshape(batch * length, width), sin.reshape(batch * length, width)
            positions = torch.arange(batch * length, device=q.device).view(batch, length)
        return (
            rope(q, cos, sin, interleaved, positions=positions, layout="BHSD"),
            rope(k, cos, sin, interleaved, positions=positions, layout="BHSD"),
        )

    apply_rotary_pos_emb.__doc__ = f"`lz.rope` in the place of {getattr(theirs, '__module__', '')}.{NAME}"
    return apply_rotary_pos_emb


@torch.no_grad()
def _same(theirs: Any, ours: Any, times: int, dtype: torch.dtype, device: Any) -> bool:
    """Whether both give the same, for one table and for one per sequence."""
    generator = torch.Generator().manual_seed(0)
    for tables in (1, 2):
        q, k = (torch.randn(2, heads, 5, 16, generator=generator).to(device, dtype) for heads in (4, 2))
        angles = torch.randn(tables, 5, 8, generator=generator).repeat(1, 1, 2 // times)
        cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
        try:
            expected = theirs(q, k, cos, sin)
        # A function of other shapes raises whatever it raises.
        except Exception:  # noqa: BLE001
            return False
        if not all(close(a, b) for a, b in zip(expected, ours(q, k, cos, sin), strict=True)):
            return False
    return True
