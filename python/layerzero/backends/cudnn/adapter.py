"""cuDNN's frontend (`cudnn`, of the package nvidia-cudnn-frontend), read from its sources at v1.10.0 to v1.23.0.

Run on an H200 at 1.32.0 with cuDNN 9.19: dense and cross attention against float64.

It serves many queries at a time: a plan holds for one set of lengths, and while one token after another is decoded every
call has lengths of its own. Gradients are not asked for.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .._shared.library import Library
from .._shared.operands import positive, readable
from .plans import Kind, Plans, operand

_OLDEST = 91002
"""cuDNN 9.10.2: earlier ones get lengths, windows or heads wrong that later ones serve."""

_library = Library(
    "cudnn",
    *("backend_version", "create_handle", "data_type", "diagonal_alignment", "heur_mode", "pygraph", "set_stream"),
    own_version=True,
    advice="install nvidia-cudnn-frontend 1.10 or newer",
)
# The plans of the library, once it is found.
_plans: Any = None


def detect() -> str:
    """The version of the frontend; raises `ImportError` where it is missing, `RuntimeError` for a cuDNN that is too old."""
    global _plans
    version = _library.find()
    found = int(_library.backend_version())
    if found < _OLDEST:
        raise RuntimeError(f"cuDNN {found} is older than {_OLDEST}")
    _plans = Plans(import_module("cudnn"))
    return version


def attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, window_left: int, layout: str
) -> Tensor:
    """Dense attention, aligned bottom-right; heads that share keys read them once."""
    query, scale = positive(query, scale)
    sequence_first = layout == "BSHD"
    if sequence_first:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    query, key, value = _loadable(query), _loadable(key), _loadable(value)
    batch, heads, seq_q, head_dim = query.shape
    seq_k, v_dim = value.shape[2:]
    if sequence_first:
        output = query.new_empty((batch, seq_q, heads, v_dim))
        target = output.transpose(1, 2)
    else:
        output = target = query.new_empty((batch, heads, seq_q, v_dim))
    kind = Kind(
        query.get_device(),
        query.dtype,
        causal,
        # Its bound counts the query's own position; one that holds nothing back is none.
        window_left + 1 if causal and 0 <= window_left < seq_k - 1 else 0,
        float(head_dim**-0.5 if scale is None else scale),
        (operand(query), operand(key), operand(value), operand(target)),
    )
    _plans.run(kind, query, key, value, target)
    return output


def cross(query: Tensor, key: Tensor, value: Tensor, scale: float | None, layout: str) -> Tensor:
    """The same, to another sequence."""
    return attention(query, key, value, False, scale, -1, layout)


def _loadable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where cuDNN cannot load from it: off a bound of 16 bytes, or one element in several places."""
    spread = all(stride != 0 or size == 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor if spread and readable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


KERNELS: dict[str, Callable[..., Any]] = {
    "cudnn.sdpa": attention,
    "cudnn.sdpa.cross": cross,
}
