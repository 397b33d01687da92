"""``lz.pack``: a weight laid out as matrix products on the CPU read it, once, for all calls that use it.

A packed weight has blocks of 32 output features. Inside a block the features of the input follow each other, each with its
32 weights side by side (``blocked_32x1``). bfloat16 has two features of the input side by side (``blocked_32x2``), as the
instructions for bfloat16 multiply them, and is padded to 32 of them.
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
FUNCTIONS = frozenset(["linear", "linear_packed"])
#: Output features of a block.
_ROWS = 32
#: Groups of features of the input that a weight is padded to, where a group has more than one.
_GROUPS = 16
#: Features of the input side by side, by dtype.
_INTERLEAVE = {"float32": 1, "float16": 1, "bfloat16": 2}


class PackedWeight:
    """A weight that :func:`layerzero.pack` packed, for :func:`layerzero.linear`.

    It is a copy, and owns its memory (:attr:`nbytes`), which is freed with it. It does not follow changes of the weight it
    was made of: pack the weight again after you changed it. Gradients flow to the input of a layer, not to the weight.
    """

    __slots__ = ("blocks", "interleave", "shape")

    blocks: Tensor
    """The numbers: ``[blocks of 32 outputs, groups of inputs, 32, interleave]``. What pads them is zero."""
    shape: tuple[int, int]
    """Output and input features: the shape of the weight before it was packed."""
    interleave: int
    """Features of the input side by side."""

    def __init__(self, blocks: Tensor, shape: tuple[int, int], interleave: int) -> None:
        self.blocks, self.shape, self.interleave = blocks, shape, interleave

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
        """Of the weight, and of the inputs it can be multiplied with."""
        return self.blocks.dtype

    @property
    def device(self) -> torch.device:
        """Where it is: the CPU."""
        return self.blocks.device

    @property
    def format(self) -> str:
        """How the weight lies in memory: ``blocked_32x1`` or ``blocked_32x2``."""
        return f"blocked_{_ROWS}x{self.interleave}"

    @property
    def nbytes(self) -> int:
        """Bytes of memory, with what pads the blocks."""
        return self.blocks.numel() * self.blocks.element_size()

    def unpack(self) -> Tensor:
        """The weight as it was: a new tensor with the same numbers."""
        from layerzero.backends._shared.packed_weights import unpacked

        return unpacked(self.blocks, *self.shape).clone()

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"PackedWeight({self.shape[0]}x{self.shape[1]} {dtype}, {self.format}, {self.nbytes:,} bytes)"


def pack(weight: Tensor) -> PackedWeight:
    """Packs the weight of a linear layer for fast matrix products on the CPU.

    ``weight`` is ``[out_features, in_features]``, as ``nn.Linear`` has it, in float32, bfloat16 or float16. Pass what you
    get to :func:`layerzero.linear` in the place of the weight::

        packed = lz.pack(layer.weight)
        y = lz.linear(x, packed, layer.bias)

    Packing copies the weight once (see :attr:`PackedWeight.nbytes`); the copy does not follow later changes of the weight.
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
    if weight.device.type != "cpu":
        text = f"pack: 'weight' is on {weight.device}; packed weights are for the CPU"
        raise InvalidCallError(
            text, code="WRONG_DEVICE", hint="move it with .cpu(), or call lz.linear with the plain weight"
        )
    interleave = _INTERLEAVE.get(str(weight.dtype).removeprefix("torch."))
    if interleave is None or weight.layout is not torch.strided:
        text = f"pack: 'weight' is {weight.dtype}, {weight.layout}; expected dense float32, bfloat16 or float16"
        raise InvalidCallError(
            text, code="WRONG_DTYPE", hint="convert it first, or call lz.linear with the plain weight"
        )
    outs, ins = weight.shape
    panels, groups = -(-outs // _ROWS), ins
    if interleave > 1:
        groups = -(-ins // (interleave * _GROUPS)) * _GROUPS
    with torch.no_grad():
        padded = weight.new_zeros(panels * _ROWS, groups * interleave)
        padded[:outs, :ins] = weight
        blocks = padded.view(panels, _ROWS, groups, interleave).permute(0, 2, 1, 3).contiguous()
    return PackedWeight(blocks, (outs, ins), interleave)


def unwrapped_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a call with a packed weight as those of `linear_packed`; `None` where the weight is not packed."""
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    if not isinstance(weight, PackedWeight):
        return None
    _same_features(args[0] if args else kwargs.get("input", kwargs.get("x")), weight)
    if len(args) > 1:
        args = (args[0], weight.blocks, *args[2:])
    else:
        kwargs = {**kwargs, "weight": weight.blocks}
    return args, {"out_features": weight.shape[0], "interleave": weight.interleave, **kwargs}


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
    """A call somebody asks about, by the name of an operation or a kernel: one with a packed weight is of `linear_packed`."""
    given = unwrapped_call(args, kwargs)
    if given is None:
        return op, args, kwargs
    return ("linear_packed" if op in FUNCTIONS or op == "mlp.linear" else op), *given


_native.packed_weights(PackedWeight)
