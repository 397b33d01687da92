"""What each operator will give, from shapes and dtypes alone: for tracing, and for tensors on the meta device.

The shapes are those of the operations' schemas (`crates/lz-model/src/ops`): names of sizes, where a name means the same
size in every tensor of a call. `d+1` is one more than `d`, `d?` is `d` or 1, `...rows` is any number of leading sizes.
`BSHD: …` is the shape in that layout. A size that no tensor shows is the value of the argument with its name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero import _native, layouts
from layerzero.errors import InvalidCallError

#: A seed as a tensor: an argument of operators that drop, beside those of the function.
SEED_TENSOR = "seed_tensor"
#: The default layout that was in force when a call was made: another such argument. A backward, and a graph, may run
#: where another one is.
DEFAULT_LAYOUT = "default_layout"

# A size, or what stands for it while a graph is traced.
Size = Any

FORMATS = {
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    # Two values to a byte.
    "int4": torch.uint8,
    "mxfp4": torch.uint8,
    "nvfp4": torch.uint8,
}
_FOUR_BITS = {"int4": 32, "mxfp4": 32, "nvfp4": 16}


@dataclass(frozen=True)
class Shape:
    """The shapes a tensor may have: one for each layout, or one for each number of dimensions."""

    text: str

    @property
    def like(self) -> str | None:
        """The input whose shape it is, whatever that is."""
        return self.text.removeprefix("like:") if self.text.startswith("like:") else None

    @property
    def rows_of(self) -> str | None:
        """The input whose shape it is without the last dimension."""
        return self.text.removeprefix("rows:") if self.text.startswith("rows:") else None

    def axes(self, layout: str | None, rank: int | None = None) -> list[str]:
        """Its sizes by name, in a layout if the shape has that layout, and with so many dimensions if there is one."""
        alternatives = []
        for alternative in self.text.split("|"):
            tag, colon, names = alternative.partition(":")
            alternatives.append((tag.strip() if colon else None, names.split() if colon else alternative.split()))
        found = [names for tag, names in alternatives if tag == layout and tag is not None]
        found = found or [names for _, names in alternatives]
        return next((names for names in found if _fits(names, rank)), found[0])


def _fits(names: list[str], rank: int | None) -> bool:
    return rank is None or (rank >= len(names) - 1 if names[0].startswith("...") else rank == len(names))


@dataclass(frozen=True)
class Rule:
    """The tensors an operator takes and gives."""

    name: str
    # The sets of tensors it can be called with, one per operation that differs: shapes by argument, and which are required.
    forms: tuple[dict[str, Shape], ...]
    required: tuple[frozenset[str], ...]
    # Shapes of the results, and either the input whose dtype they have or the dtype.
    outputs: tuple[tuple[Shape, str | None, torch.dtype | None], ...]
    # The setting that says the layout of a call that does not.
    layout_setting: str | None

    @property
    def row_inputs(self) -> frozenset[str]:
        """Inputs whose leading sizes are rows that are worked on one by one."""
        if self.name in _COMPUTED:
            return frozenset()
        return frozenset(name for name, shape in self.forms[0].items() if shape.text.startswith("...rows"))

    @property
    def differentiable(self) -> bool:
        """Whether gradients can flow through it: results have the dtype of an input, or are floats again."""
        return self.name == "dequantize" or any(like is not None for _, like, _ in self.outputs)

    def form(self, values: dict[str, Any]) -> dict[str, Shape]:
        """The shapes of the operation that has all these tensors."""
        given = frozenset(name for name, value in values.items() if isinstance(value, Tensor))
        known = frozenset(name for form in self.forms for name in form)
        fitting = zip(self.forms, self.required, strict=True)
        return next(
            (form for form, needed in fitting if needed <= given and given & known <= form.keys()), self.forms[0]
        )

    def layout(self, values: dict[str, Any]) -> str | None:
        """The layout of a call."""
        said = values.get("layout") or values.get(DEFAULT_LAYOUT)
        return said or (layouts.here(self.layout_setting) if self.layout_setting is not None else None)


def _quantized(
    input: Tensor,
    dtype: str,
    granularity: str = "per_tensor",
    group_size: Size | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    stored = FORMATS.get(dtype)
    if stored is None:
        raise InvalidCallError(f"quantize: dtype is '{dtype}', expected one of {', '.join(FORMATS)}", code="BAD_PARAM")
    if input.dim() == 0:
        raise InvalidCallError("quantize: 'input' has no dimension, expected rows of values", code="WRONG_RANK")
    *leading, columns = input.shape
    rows = math.prod(leading)
    packed = [*leading, columns // 2] if stored == torch.uint8 else input.shape
    group = _FOUR_BITS.get(dtype, 32) if group_size is None else group_size
    scales = (
        1 if granularity == "per_tensor" else rows,
        (columns + group - 1) // group if granularity == "blockwise" else 1,
    )
    new = input.new_empty
    return new(packed, dtype=stored), new(scales, dtype=torch.float32), new(scales, dtype=torch.int32)


def _dequantized(
    values: Tensor, scales: Tensor, dtype: str = "float32", format: str | None = None, **_: Any
) -> tuple[Tensor, ...]:
    floats = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
    if dtype not in floats:
        raise InvalidCallError(f"dequantize: dtype is '{dtype}', expected one of {', '.join(floats)}", code="BAD_PARAM")
    shape = [*values.shape[:-1], 2 * values.shape[-1]] if format in _FOUR_BITS else values.shape
    return (values.new_empty(shape, dtype=floats[dtype]),)


#: Results whose sizes are computed from the values of arguments.
_COMPUTED: dict[str, Callable[..., tuple[Tensor, ...]]] = {"quantize": _quantized, "dequantize": _dequantized}


def _rule(function: dict[str, Any]) -> Rule:
    forms = function["forms"]
    return Rule(
        function["name"],
        tuple({name: Shape(shape) for name, shape, _ in form} for form in forms),
        tuple(frozenset(name for name, _, required in form if required) for form in forms),
        tuple(
            (Shape(output["shape"]), output["dtype_of"], output["dtype"] and getattr(torch, output["dtype"]))
            for output in function["outputs"]
        ),
        function["layout_setting"],
    )


RULES: dict[str, Rule] = {function["name"]: _rule(function) for function in _native.functions()}


def fake(name: str, values: dict[str, Any]) -> tuple[Tensor, ...]:
    """The results of an operator, with shapes, dtypes and devices but nothing in them. They are contiguous."""
    rule = RULES[name]
    _on_one_device(name, values)
    if name in _COMPUTED:
        return _COMPUTED[name](**values)
    layout, form = rule.layout(values), rule.form(values)
    if values.get("normalized_shape") is not None:
        # Weights of a norm over several dimensions have as many; they are checked when the operator runs.
        form = {"input": form["input"]}
    named = {symbol for shape, _, _ in rule.outputs if not shape.like for symbol in shape.axes(layout)}
    sizes = {argument: values[argument] for argument in named & values.keys()}
    groups: dict[str, tuple[Size, ...]] = {}
    for argument, shape in form.items():
        tensor = values.get(argument)
        if tensor is not None:
            _match(name, argument, tensor, shape.axes(layout, tensor.dim()), sizes, groups)
    first = next(iter(form))
    results = []
    for shape, like, dtype in rule.outputs:
        if like is not None and not values[like].dtype.is_floating_point:
            text = f"{name}: '{like}' is {values[like].dtype}, expected a float dtype"
            raise InvalidCallError(text, code="WRONG_DTYPE")
        made = _sizes(shape, layout, values, sizes, groups)
        results.append(values[like or first].new_empty(made, dtype=dtype))
    return tuple(results)


def _sizes(
    shape: Shape,
    layout: str | None,
    values: dict[str, Any],
    sizes: dict[str, Size],
    groups: dict[str, tuple[Size, ...]],
) -> list[Size]:
    """The sizes of a result."""
    if shape.like:
        return list(values[shape.like].shape)
    if shape.rows_of:
        return list(values[shape.rows_of].shape[:-1])
    result: list[Size] = []
    for symbol in shape.axes(layout):
        if symbol.startswith("..."):
            result += groups[symbol]
        else:
            known = symbol.removesuffix("+1")
            result.append(sizes[known] + 1 if known != symbol else sizes[known])
    return result


def _on_one_device(name: str, values: dict[str, Any]) -> None:
    # A seed is drawn on the host, wherever the rest is.
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor) and key != SEED_TENSOR}
    first = next(iter(tensors))
    for key, tensor in tensors.items():
        if tensor.device != tensors[first].device:
            text = f"{name}: '{key}' is on {tensor.device} but '{first}' is on {tensors[first].device}"
            hint = f"move '{key}' to the device of '{first}'"
            raise InvalidCallError(text, code="MIXED_DEVICES", hint=hint)


def _match(
    name: str,
    argument: str,
    tensor: Tensor,
    symbols: list[str],
    sizes: dict[str, Size],
    groups: dict[str, tuple[Size, ...]],
) -> None:
    """Gives names their sizes, and compares those that have one."""

    def wrong() -> str:
        return f"{name}: '{argument}' has shape {list(tensor.shape)}, which does not fit ({', '.join(symbols)})"

    given, rest = tuple(tensor.shape), symbols
    if symbols[0].startswith("..."):
        first, *rest = symbols
        split = len(given) - len(rest)
        if split < 0:
            raise InvalidCallError(wrong(), code="WRONG_RANK")
        _same(groups.setdefault(first, given[:split]), given[:split], wrong)
        given = given[split:]
    if len(given) != len(rest):
        raise InvalidCallError(wrong(), code="WRONG_RANK")
    for size, symbol in zip(given, rest, strict=True):
        if symbol.endswith("?"):
            expected = sizes.get(symbol.removesuffix("?"))
            # Symbols are compared when the operator runs: a graph must not depend on which of the two a size is.
            if isinstance(size, int) and size != 1 and isinstance(expected, int):
                _same((expected,), (size,), wrong)
            continue
        known = symbol.removesuffix("+1")
        expected = int(known) if known.isdigit() else sizes.setdefault(known, size if known == symbol else size - 1)
        _same((expected if known == symbol else expected + 1,), (size,), wrong)


def _same(expected: tuple[Size, ...], given: tuple[Size, ...], wrong: Callable[[], str]) -> None:
    if len(expected) != len(given):
        raise InvalidCallError(wrong(), code="WRONG_RANK")
    for a, b in zip(expected, given, strict=True):
        same = a == b
        if same is False:
            raise InvalidCallError(wrong(), code="WRONG_SIZE")
        if same is not True:
            # Symbols: sizes only known at run time are compared then.
            torch._check_value(same, wrong)  # type: ignore[no-untyped-call]
