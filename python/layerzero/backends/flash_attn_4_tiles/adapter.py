"""FlashAttention 4 with tiles it does not choose itself: for sequences that are short for those it does.

The library works on 192 queries and 128 keys at a time where heads are of 64, whatever the sequences: of 197 queries that
leaves half a tile empty, of 77 keys two fifths. Run on an H200 at 4.0.0b36. The tiles are an argument of a function the
library does not publish, so that this is a backend of its own, which is there where that function takes them.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.kernels import direct

from .._shared.flash_attn_4.attention import library, operand, single_launch
from .._shared.library import Library
from .._shared.operands import positive

_ARGUMENTS = ("softmax_scale", "causal", "tile_mn")
_interface = Library("flash_attn.cute", modules={"flash_attn.cute.interface": ("_flash_attn_fwd",)})

#: The queries and keys of a tile, for a query and a key in the given layout.
_Tile = Callable[[Tensor, Tensor, str], tuple[int, int]]


def detect() -> str:
    """The version of flash-attn-4; raises `ImportError` where it is missing or does not take tiles."""
    library.find()
    version = _interface.find()
    taken = inspect.signature(_interface._flash_attn_fwd).parameters
    missing = [name for name in _ARGUMENTS if name not in taken]
    if missing:
        raise ImportError(f"flash_attn.cute {version} does not take {', '.join(missing)} for its forward pass")
    return version


def few_rows(query: Tensor, key: Tensor, layout: str) -> tuple[int, int]:
    """64 queries at a time: more tiles, so that a short batch keeps more of the device at work."""
    return (64, 128 if query.shape[-1] <= 64 else 64)


def all_keys(query: Tensor, key: Tensor, layout: str) -> tuple[int, int]:
    """All keys at once, with as little left over as there can be."""
    keys = key.shape[2 if layout == "BHSD" else 1]
    return (192 if keys <= 128 else 128, -(-keys // 16) * 16)


def _dense(tile: _Tile) -> Callable[..., Tensor]:
    def whole(
        query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, layout: str
    ) -> tuple[Any, ...] | None:
        keywords = {"softmax_scale": scale, "causal": causal, "tile_mn": tile(query, key, layout)}
        return single_launch(_interface._flash_attn_fwd, (query, key, value), layout, **keywords)

    @direct(whole)
    def attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, layout: str) -> Tensor:
        size = tile(query, key, layout)
        query, scale = positive(query, scale)
        operands = (operand(tensor, layout).detach() for tensor in (query, key, value))
        output: Tensor = _interface._flash_attn_fwd(*operands, softmax_scale=scale, causal=causal, tile_mn=size)[0]
        return output.transpose(1, 2) if layout == "BHSD" else output

    return attention


def _cross(dense: Any) -> Callable[..., Tensor]:
    def whole(query: Tensor, key: Tensor, value: Tensor, scale: float | None, layout: str) -> tuple[Any, ...] | None:
        call: tuple[Any, ...] | None = dense.direct(query, key, value, False, scale, layout)
        return call

    @direct(whole)
    def attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None, layout: str) -> Tensor:
        output: Tensor = dense(query, key, value, False, scale, layout)
        return output

    return attention


_few_rows, _all_keys = _dense(few_rows), _dense(all_keys)

KERNELS: dict[str, Callable[..., Any]] = {
    "flash_attn.v4.few_rows": _few_rows,
    "flash_attn.v4.few_rows.cross": _cross(_few_rows),
    "flash_attn.v4.all_keys": _all_keys,
    "flash_attn.v4.all_keys.cross": _cross(_all_keys),
}
