"""What each operator will give, from shapes and dtypes alone: for tracing, and for tensors on the meta device.

A shape is written as the names of its sizes: a name means the same size wherever it stands, `d+1` one more than `d`,
`...rows` any number of leading sizes. A name that is an argument of the operator has that argument's value.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import InvalidCallError

#: A seed as a tensor: an argument of operators that drop, beside those of the function.
SEED_TENSOR = "seed_tensor"

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
class Rule:
    """The shapes an operator takes and gives."""

    # Of inputs whose shape is known; others are checked when the operator runs.
    inputs: Mapping[str, str] = field(default_factory=dict)
    # Shapes of the results, and the input whose dtype they have, or the dtype.
    outputs: tuple[tuple[str, str | torch.dtype], ...] = ()
    # Gives the results where shapes alone do not tell.
    give: Callable[..., tuple[Tensor, ...]] | None = None
    differentiable: bool = False

    @property
    def row_inputs(self) -> frozenset[str]:
        """Inputs whose leading sizes are rows that are worked on one by one."""
        return frozenset(name for name, shape in self.inputs.items() if shape.startswith("...rows"))


def _like(shape: str, dtype: str, **inputs: str) -> Rule:
    """One result with the dtype of an input."""
    return Rule(inputs, ((shape, dtype),), differentiable=True)


def _ids(shapes: list[str], **inputs: str) -> Rule:
    """Results that are token ids or counts."""
    return Rule(inputs, tuple((shape, torch.int64) for shape in shapes))


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


_CACHE = "p x y d"
_DENSE = {"query": "b m n d", "key": "b x y d", "value": "b x y e"}

RULES: dict[str, Rule] = {
    # The layout does not matter here: result and query agree in all but the last size.
    "attention": _like("b m n e", "query", **_DENSE),
    "cross_attention": _like("b m n e", "query", **_DENSE),
    "varlen_attention": _like(
        "t h e", "query", query="t h d", key="x y d", value="x y e", cu_seqlens_q="b+1", cu_seqlens_k="b+1"
    ),
    "paged_attention": _like(
        "...query",
        "query",
        query="...query",
        key_cache=_CACHE,
        value_cache=_CACHE,
        block_tables="b t",
        context_lens="b",
    ),
    "attention_lse": Rule(_DENSE, (("b m n e", "query"), ("b m n", torch.float32)), differentiable=True),
    "varlen_attention_lse": Rule(
        {"query": "t h d", "key": "x y d", "value": "x y e", "cu_seqlens_q": "b+1", "cu_seqlens_k": "b+1"},
        (("t h e", "query"), ("t h", torch.float32)),
        differentiable=True,
    ),
    "paged_attention_lse": Rule(
        {"query": "t h d", "key_cache": _CACHE, "value_cache": _CACHE, "block_tables": "b w", "context_lens": "b"},
        (("t h d", "query"), ("t h", torch.float32)),
        differentiable=True,
    ),
    "merge_states": Rule(
        {"out_a": "...rows d", "lse_a": "...rows", "out_b": "...rows d", "lse_b": "...rows"},
        (("...rows d", "out_a"), ("...rows", torch.float32)),
        differentiable=True,
    ),
    "mla_attention": _like("t h c", "q_nope", q_nope="t h c", q_pe="t h r"),
    "sparse_attention": _like("m n d", "query", query="m n d", key="x y d", value="x y d"),
    "embedding": _like("...rows h", "weight", indices="...rows", weight="v h"),
    "rope": _like("...input", "input", input="...input", cos="t r", sin="t r"),
    "alibi_bias": _like("h seq_q seq_k", "slopes", slopes="h"),
    "rms_norm": _like("...rows h", "input", input="...rows h", weight="h"),
    "layer_norm": _like("...rows h", "input", input="...rows h"),
    "fused_add_rms_norm": Rule(
        {"input": "...rows h", "residual": "...rows h", "weight": "h"},
        (("...rows h", "input"), ("...rows h", "input")),
        differentiable=True,
    ),
    "linear": _like("...rows n", "input", input="...rows k", weight="n k", bias="n"),
    "fused_mlp": _like("...rows h", "input", input="...rows h", up_weight="f h", down_weight="h f", gate_weight="f h"),
    "silu_mul": _like("...rows h", "gate", gate="...rows h", up="...rows h"),
    "gelu": _like("...rows h", "input", input="...rows h"),
    "sample_topk": _ids(["...rows"], logits="...rows v", uniform="...rows"),
    "sample_topp": _ids(["...rows"], logits="...rows v", uniform="...rows"),
    "speculative_verify": _ids(
        ["b d+1", "b"], draft_ids="b d", draft_probs="b d v", target_probs="b d+1 v", uniform="b d+1"
    ),
    "quantize": Rule(give=_quantized),
    "dequantize": Rule(give=_dequantized, differentiable=True),
    "kv_append": Rule(
        {"key": "t h d", "value": "t h d", "key_cache": _CACHE, "value_cache": _CACHE, "slot_mapping": "t"}
    ),
    "kv_compact": Rule({"key_cache": _CACHE, "value_cache": _CACHE, "moves": "m 2"}),
}


def fake(name: str, values: dict[str, Any]) -> tuple[Tensor, ...]:
    """The results of an operator, with shapes, dtypes and devices but nothing in them. They are contiguous."""
    rule = RULES[name]
    _on_one_device(name, values)
    if rule.give is not None:
        return rule.give(**values)
    named = {symbol for shape, _ in rule.outputs for symbol in shape.split()}
    sizes = {argument: values[argument] for argument in named & values.keys()}
    groups: dict[str, tuple[Size, ...]] = {}
    for argument, shape in rule.inputs.items():
        tensor = values.get(argument)
        if tensor is not None:
            _match(name, argument, tensor, shape, sizes, groups)
    return tuple(_new(name, values, shape, dtype, sizes, groups) for shape, dtype in rule.outputs)


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
    shape: str,
    sizes: dict[str, Size],
    groups: dict[str, tuple[Size, ...]],
) -> None:
    """Gives names their sizes, and compares those that have one."""

    def wrong() -> str:
        return f"{name}: '{argument}' has shape {list(tensor.shape)}, which does not fit ({', '.join(shape.split())})"

    first, *rest = shape.split()
    given = tuple(tensor.shape)
    if first.startswith("..."):
        split = len(given) - len(rest)
        if split < 0:
            raise InvalidCallError(wrong(), code="WRONG_RANK")
        _same(groups.setdefault(first, given[:split]), given[:split], wrong)
        given = given[split:]
    else:
        rest = [first, *rest]
    if len(given) != len(rest):
        raise InvalidCallError(wrong(), code="WRONG_RANK")
    for size, symbol in zip(given, rest, strict=True):
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


def _new(
    name: str,
    values: dict[str, Any],
    shape: str,
    dtype: str | torch.dtype,
    sizes: dict[str, Size],
    groups: dict[str, tuple[Size, ...]],
) -> Tensor:
    like: Tensor = values[dtype if isinstance(dtype, str) else next(iter(RULES[name].inputs))]
    if isinstance(dtype, str):
        if not like.dtype.is_floating_point:
            raise InvalidCallError(f"{name}: '{dtype}' is {like.dtype}, expected a float dtype", code="WRONG_DTYPE")
        dtype = like.dtype
    result: list[Size] = []
    for symbol in shape.split():
        if symbol.startswith("..."):
            result += groups[symbol]
        elif symbol.endswith("+1"):
            result.append(sizes[symbol.removesuffix("+1")] + 1)
        else:
            result.append(sizes[symbol])
    return like.new_empty(result, dtype=dtype)
