"""``lz.pack``: a weight laid out as matrix products on the CPU read it, once, for all calls that use it.

A packed weight has blocks of 32 output features. Inside a block the features of the input follow each other, each with its
32 weights side by side (``blocked_32x1``). bfloat16 has two features of the input side by side (``blocked_32x2``), as the
instructions for bfloat16 multiply them, and is padded to 32 of them.

A weight can be rounded to integers of 8 or 4 bits, with scales that are float32: weight = integer · scale. A scale covers a
row of the weight, or a group of features of the input. Integers of 4 bits have eight features of the input side by side
(``blocked_32x8``), two in a byte, and are padded to 128 of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from layerzero import _native
from layerzero.errors import ArgumentTypeError, InvalidCallError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["PackedWeight", "pack"]

#: Functions that take a packed weight.
FUNCTIONS = frozenset(["linear", "linear_packed", "linear_quantized"])
#: Output features of a block.
_ROWS = 32
#: Groups of features of the input that a weight is padded to, where a group has more than one.
_GROUPS = 16
#: Features of the input side by side, by dtype.
_INTERLEAVE = {"float32": 1, "float16": 1, "bfloat16": 2}
#: The largest integer of a dtype that weights are rounded to.
_LARGEST = {"int8": 127, "int4": 7}
#: Features of the input that may share a scale, and how many do if nothing is said: 0 for all of them.
_GROUP_SIZES = (32, 64, 128, 256)
_USUAL_GROUP = {"int8": 0, "int4": 64}
#: Rows of a weight that are rounded at a time.
_ROUNDED_ROWS = 1024


class PackedWeight:
    """A weight that :func:`layerzero.pack` packed, for :func:`layerzero.linear`.

    It is a copy, and owns its memory (:attr:`nbytes`), which is freed with it. It does not follow changes of the weight it
    was made of: pack the weight again after you changed it. Gradients flow to the input of a layer, not to the weight.
    """

    __slots__ = ("blocks", "group", "interleave", "scales", "shape")

    blocks: Tensor
    """The numbers: ``[blocks of 32 outputs, groups of inputs, 32, interleave]``. What pads them is zero. A byte of ``uint8`` is
    two integers of 4 bits in two's complement, the first of them in the lower bits."""
    shape: tuple[int, int]
    """Output and input features: the shape of the weight before it was packed."""
    interleave: int
    """Numbers side by side: features of the input, or bytes of two of them."""
    scales: Tensor | None
    """What integers are multiplied with: ``[blocks of 32 outputs, groups, 32]`` in float32. None for floats."""
    group: int
    """Features of the input that share a scale; 0 for all of them."""

    def __init__(
        self, blocks: Tensor, shape: tuple[int, int], interleave: int, scales: Tensor | None = None, group: int = 0
    ) -> None:
        self.blocks, self.shape, self.interleave = blocks, shape, interleave
        self.scales, self.group = scales, group

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.shape[0]

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of :attr:`blocks`. Floats can be multiplied with inputs of the same dtype, integers with float32, bfloat16 and float16."""
        return self.blocks.dtype

    @property
    def kind(self) -> str:
        """What a weight is: ``float32``, ``bfloat16``, ``float16``, ``int8`` or ``int4``."""
        return _kind(self.dtype)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.blocks.device

    @property
    def format(self) -> str:
        """How the weight lies in memory: ``blocked_32x1``, ``blocked_32x2`` or, of int4, ``blocked_32x8``."""
        return f"blocked_{_ROWS}x{self.interleave * (2 if self.kind == 'int4' else 1)}"

    @property
    def nbytes(self) -> int:
        """Bytes of memory, with the scales and with what pads the blocks."""
        parts = [self.blocks] if self.scales is None else [self.blocks, self.scales]
        return sum(part.numel() * part.element_size() for part in parts)

    def unpack(self) -> Tensor:
        """The weight: a new tensor with the same numbers. That of integers is float32: each is multiplied with its scale."""
        from layerzero.backends._shared.packed_weights import dequantized, unpacked

        if self.scales is None:
            return unpacked(self.blocks, *self.shape).clone()
        return dequantized(self.blocks, self.scales, *self.shape, self.group)

    def __repr__(self) -> str:
        scales = ""
        if self.scales is not None:
            scales = f" a scale for {self.group} inputs," if self.group else " a scale for each output,"
        return (
            f"PackedWeight({self.shape[0]}x{self.shape[1]} {self.kind}, {self.format},{scales} {self.nbytes:,} bytes)"
        )


def _kind(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return "int4" if name == "uint8" else name


def pack(weight: Tensor, *, dtype: str | None = None, group: int | None = None) -> PackedWeight:
    """Packs the weight of a linear layer for fast matrix products on the CPU.

    ``weight`` is ``[out_features, in_features]``, as ``nn.Linear`` has it, in float32, bfloat16 or float16. Pass what you
    get to :func:`layerzero.linear` in the place of the weight::

        packed = lz.pack(layer.weight)
        y = lz.linear(x, packed, layer.bias)

    Packing copies the weight once (see :attr:`PackedWeight.nbytes`); the copy does not follow later changes of the weight.

    Args:
        weight: the weight.
        dtype: ``"int8"`` or ``"int4"`` rounds the weight to integers: scale = max|w| / 127 (7 for int4) and integer =
            round(w / scale), half to even. A product of few rows is as fast as its weight is read, so fewer bytes are
            faster. What rounding does to a model's results depends on the model: compare them.
        group: how many features of the input share a scale: 32, 64, 128 or 256. Where nothing is said, a row of the weight
            has one scale for int8, and one for each 64 features for int4.

    Raises:
        InvalidCallError: the weight cannot be packed so; the message says why.
    """
    import torch

    if not isinstance(weight, torch.Tensor):
        text = f"pack: 'weight' is a {type(weight).__name__}, expected a tensor"
        raise ArgumentTypeError(
            text, code="NOT_A_TENSOR", hint="pass the weight of a linear layer: lz.pack(layer.weight)"
        )
    if weight.dim() != 2:
        text = f"pack: 'weight' has shape {list(weight.shape)}, expected [out_features, in_features]"
        raise InvalidCallError(text, code="WRONG_RANK", hint="pass a matrix, as nn.Linear's weight is")
    if weight.device.type != "cpu" and dtype is None:
        text = f"pack: 'weight' is on {weight.device}; packed floats are for the CPU"
        raise InvalidCallError(
            text, code="WRONG_DEVICE", hint="move it with .cpu(), or call lz.linear with the plain weight"
        )
    interleave = _INTERLEAVE.get(str(weight.dtype).removeprefix("torch."))
    if interleave is None or weight.layout is not torch.strided:
        text = f"pack: 'weight' is {weight.dtype}, {weight.layout}; expected dense float32, bfloat16 or float16"
        raise InvalidCallError(
            text, code="WRONG_DTYPE", hint="convert it first, or call lz.linear with the plain weight"
        )
    size = _group_size(dtype, group)
    with torch.no_grad():
        if dtype is not None:
            return _rounded(weight, dtype, size)
        outs, ins = weight.shape
        blocks = weight.new_zeros(-(-outs // _ROWS), _groups(ins, interleave), _ROWS, interleave)
        _put(weight, blocks)
    return PackedWeight(blocks, (outs, ins), interleave)


def _group_size(dtype: str | None, group: int | None) -> int:
    """How many features share a scale."""
    if dtype is not None and dtype not in _LARGEST:
        text = f"pack: 'dtype' is {dtype!r}, expected 'int8', 'int4' or nothing"
        raise InvalidCallError(text, code="BAD_PARAM", hint="leave dtype out to keep the numbers as they are")
    if group is None:
        return 0 if dtype is None else _USUAL_GROUP[dtype]
    if dtype is None:
        text = f"pack: 'group' is {group!r}, but the weight is not rounded to integers"
        raise InvalidCallError(text, code="BAD_PARAM", hint="pass dtype='int8' or dtype='int4', or leave group out")
    if isinstance(group, bool) or group not in _GROUP_SIZES:
        text = f"pack: 'group' is {group!r}, expected one of {', '.join(map(str, _GROUP_SIZES))}"
        raise InvalidCallError(text, code="BAD_PARAM", hint="leave group out for the usual one")
    return group


def _groups(ins: int, features: int) -> int:
    """Groups of so many features side by side, with what pads them."""
    return ins if features == 1 else -(-ins // (features * _GROUPS)) * _GROUPS


def _put(rows: Tensor, blocks: Tensor) -> None:
    """Writes rows of numbers to their places in blocks of 32 rows; the last may be missing."""
    panels, groups, _, interleave = blocks.shape
    padded = rows.new_zeros(panels * _ROWS, groups * interleave)
    padded[: rows.shape[0], : rows.shape[1]] = rows
    blocks.copy_(padded.view(panels, _ROWS, groups, interleave).permute(0, 2, 1, 3))


def _rounded(weight: Tensor, dtype: str, group: int) -> PackedWeight:
    """The weight as integers with scales."""
    import torch

    (outs, ins), panels = weight.shape, -(-weight.shape[0] // _ROWS)
    counted = -(-ins // group) if group else 1
    scales = torch.zeros(panels * _ROWS, counted, device=weight.device)
    halves = dtype == "int4"
    interleave = 4 if halves else 1
    stored = torch.uint8 if halves else torch.int8
    groups = _groups(ins, 2 * interleave if halves else interleave)
    blocks = torch.zeros(panels, groups, _ROWS, interleave, dtype=stored, device=weight.device)
    for first in range(0, outs, _ROUNDED_ROWS):
        rows = weight[first : first + _ROUNDED_ROWS].float()
        if not rows.isfinite().all():
            text = "pack: 'weight' has numbers that are not finite, which no integer is"
            raise InvalidCallError(text, code="BAD_DATA", hint="pack it without dtype, which keeps the numbers")
        width = group or max(ins, 1)
        padded = rows.new_zeros(rows.shape[0], counted * width)
        padded[:, :ins] = rows
        padded = padded.view(rows.shape[0], counted, width)
        scale = padded.abs().amax(-1) / _LARGEST[dtype]
        # A scale of zero is of zeros, or of numbers too small for it.
        integers = (padded / scale.where(scale > 0, 1.0)[..., None]).round_().to(torch.int8).flatten(1)[:, :ins]
        scales[first : first + rows.shape[0]] = scale
        here = slice(first // _ROWS, -(-(first + rows.shape[0]) // _ROWS))
        _put(_in_halves(integers) if halves else integers, blocks[here])
    laid = scales.view(panels, _ROWS, counted).permute(0, 2, 1).contiguous()
    return PackedWeight(blocks, (outs, ins), interleave, laid, group)


def _in_halves(integers: Tensor) -> Tensor:
    """Two integers of 4 bits to a byte, the first of them in the lower bits."""
    import torch

    even = integers.new_zeros(integers.shape[0], integers.shape[1] + integers.shape[1] % 2)
    even[:, : integers.shape[1]] = integers
    lower, upper = (even.view(torch.uint8) & 15).view(*even.shape[:-1], -1, 2).unbind(-1)
    return lower | upper << 4


def unwrapped_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    """A call with a packed weight as one of the function that takes its parts, which is named; `None` where the weight is not
    packed."""
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    if not isinstance(weight, PackedWeight):
        return None
    _same_features(args[0] if args else kwargs.get("input", kwargs.get("x")), weight)
    if len(args) > 1:
        args = (args[0], weight.blocks, *args[2:])
    else:
        kwargs = {**kwargs, "weight": weight.blocks}
    sizes: dict[str, Any] = {"out_features": weight.shape[0], "interleave": weight.interleave}
    if weight.scales is None:
        return "linear_packed", args, {**sizes, **kwargs}
    return "linear_quantized", args, {**sizes, "scales": weight.scales, "group_size": weight.group, **kwargs}


def _same_features(given: Any, weight: PackedWeight) -> None:
    """Refuses an input that has not the features of the weight. The blocks do not tell: what pads them looks like features.

    What is no tensor, or has no dimension, is refused where the call is read.
    """
    shape: Any = getattr(given, "shape", ())
    if len(shape) > 0 and shape[-1] != weight.shape[1]:
        text = f"lz.linear: the input has {shape[-1]} features, the packed weight takes {weight.shape[1]}"
        hint = (
            f"pass an input whose last dimension is {weight.shape[1]}, or the packed weight of the layer for this input"
        )
        raise InvalidCallError(text, code="WRONG_SHAPE", hint=hint)


def asked_about(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """A call somebody asks about, by the name of an operation or a kernel: one with a packed weight is of the function that takes
    its parts."""
    given = unwrapped_call(args, kwargs)
    if given is None:
        return op, args, kwargs
    function, args, kwargs = given
    return (function if op in FUNCTIONS or op == "mlp.linear" else op), args, kwargs


_native.packed_weights(PackedWeight)
