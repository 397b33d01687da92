"""Runs the cases of testdata/ on an adapter's functions directly, by what its capabilities document says."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
_PLACE = find_spec("layerzero")
assert _PLACE is not None and _PLACE.origin is not None
BACKENDS = Path(_PLACE.origin).parent / "backends"
PACKAGE = "layerzero_without_native"

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
FLOATS = ("float64", "float32", "float16", "bfloat16")
# Two to a byte, the first in the low half: what is in the bits of a half, by its code.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FOUR_BIT = {
    "int4": [*range(8), *range(-8, 0)],
    "mxfp4": E2M1 + [-number for number in E2M1],
    "nvfp4": E2M1 + [-number for number in E2M1],
}
TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 1e-2,
    torch.float8_e4m3fn: 0.125,
    torch.float8_e5m2: 0.25,
}

DENSE = (
    "attention.standard.decode",
    "attention.standard.prefill",
    "attention.gqa.decode",
    "attention.gqa.prefill",
)
PACKED = ("attention.standard.prefill.varlen", "attention.gqa.prefill.varlen")
ALIASES = {
    "attention": DENSE,
    "attention.cross": ("attention.cross.decode", "attention.cross.prefill"),
    "attention.varlen": PACKED,
}

# What a parameter is when a case does not give it.
DEFAULTS: dict[str, Any] = {
    "causal": True,
    "scale": None,
    "window_left": -1,
    "window_right": -1,
    "softcap": 0.0,
    "dropout_p": 0.0,
    "seed": 0,
    "interleaved": False,
    "activation": "silu",
    "approximate": "none",
    "granularity": "per_tensor",
    "group_size": None,
    "zero_point": False,
    "max_seqlen_q": 0,
    "max_seqlen_k": 0,
}
# Those of one operation that are others.
OWN_DEFAULTS: dict[tuple[str, str], Any] = {
    ("mlp.linear.packed", "activation"): "none",
    ("mlp.linear.quantized", "activation"): "none",
}
# Every kernel takes any value of these.
UNIVERSAL = {
    "out_features",
    "interleave",
    "group_size",
    "max_seqlen_q",
    "max_seqlen_k",
    "shared_prefix",
    "seed",
    "eps",
    "p",
    "k",
    "seq_q",
    "seq_k",
    "block_rows",
    "block_cols",
}
FIXED_BY_ALIAS = {"attention.causal": True, "attention.full": False}

OPTIONAL = {
    "attn_mask",
    "alibi_slopes",
    "sinks",
    "positions",
    "uniform",
    "zero_points",
    "gate_weight",
    "qo_indptr",
    "kv_indptr",
}
CACHES = {"key_cache", "value_cache", "ckv_cache", "kpe_cache", "ckv", "kpe"}

_QKV = {
    "query": "BSHD: batch seq_q heads head_dim | BHSD: batch heads seq_q head_dim",
    "key": "BSHD: batch seq_k kv_heads head_dim | BHSD: batch kv_heads seq_k head_dim",
    "value": "BSHD: batch seq_k kv_heads v_dim | BHSD: batch kv_heads seq_k v_dim",
}
_PACKED = {"query": "seq_q heads head_dim", "key": "seq_k kv_heads head_dim", "value": "seq_k kv_heads v_dim"}
_CACHE = "NHD: num_blocks block_size kv_heads head_dim | HND: num_blocks kv_heads block_size head_dim"
_PAGED_DECODE = {"query": "batch heads head_dim | batch 1 heads head_dim", "key_cache": _CACHE}
_PAGED_PREFILL = {"query": "seq_q heads head_dim", "key_cache": _CACHE}
# The shapes that show the dimensions rules are about.
SHAPES: dict[str, dict[str, str]] = {
    **dict.fromkeys((*DENSE, *ALIASES["attention.cross"], "attention.lse"), _QKV),
    **dict.fromkeys((*PACKED, "attention.lse.varlen"), _PACKED),
    **{f"attention.{kind}.decode.paged": _PAGED_DECODE for kind in ("standard", "gqa")},
    **{f"attention.{kind}.prefill.paged": _PAGED_PREFILL for kind in ("standard", "gqa")},
    "attention.lse.paged": _PAGED_PREFILL,
    "attention.merge": {"out_a": "...rows v_dim"},
    "attention.sparse.block": {"query": "seq_q heads head_dim", "key": "seq_k kv_heads head_dim"},
    "attention.sparse.variable_block": {
        "query": "HND: heads seq_q head_dim | NHD: seq_q heads head_dim",
        "key": "HND: kv_heads seq_k head_dim | NHD: seq_k kv_heads head_dim",
    },
    "mlp.linear": {"input": "...rows in_features", "weight": "out_features in_features"},
    "mlp.linear.packed": {"input": "...rows in_features", "weight": "panels groups 32 interleave"},
    "mlp.linear.quantized": {"input": "...rows in_features", "weight": "panels groups 32 interleave"},
    "mlp.fused": {"input": "...rows hidden", "up_weight": "intermediate hidden"},
    "activation.gelu": {"input": "...rows width"},
    "activation.softmax": {"input": "...rows width"},
    "norm.rms": {"input": "...rows hidden"},
    "norm.fused_add_rms": {"input": "...rows hidden"},
    "quantize": {"input": "...rows cols"},
}
LAYOUT_WHEN_NOT_SAID = {
    "attention.sparse.variable_block": "HND",
    "posenc.rope": "BSHD",
    "kv_cache.append": "NHD",
    "kv_cache.compact": "NHD",
}


def load_backends() -> ModuleType:
    """The backends by their path, within a package that is not initialised and so needs no native module."""
    if PACKAGE not in sys.modules:
        package = ModuleType(PACKAGE)
        package.__path__ = [str(BACKENDS.parent)]
        sys.modules[PACKAGE] = package
    return importlib.import_module(f"{PACKAGE}.backends")


def adapter(backend: str) -> ModuleType:
    """The adapter of a backend, imported afresh if it is not there."""
    load_backends()
    place = next(BACKENDS.glob(f"**/{backend}/adapter.py")).relative_to(BACKENDS).with_suffix("")
    return importlib.import_module(f"{PACKAGE}.backends.{'.'.join(place.parts)}")


@cache
def document(backend: str) -> dict[str, Any]:
    """A backend's capabilities document."""
    text = next(BACKENDS.glob(f"**/{backend}/capabilities.json")).read_text(encoding="utf-8")
    parsed: dict[str, Any] = json.loads(text, object_pairs_hook=_unique)
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    assert len(keys) == len(set(keys)), f"a key occurs twice among {keys}"
    return dict(pairs)


@dataclass(frozen=True)
class Kernel:
    """A kernel as its document has it, with the operations behind the name it is written against."""

    rules: dict[str, Any]
    ops: tuple[str, ...]
    run: Callable[..., Any]
    #: Instruction sets it needs and its library does not use here. The engine does not choose such a kernel.
    lacking: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Its id."""
        return str(self.rules["kernel_id"])


def kernels(backend: str) -> list[Kernel]:
    """The kernels of a backend."""
    module = adapter(backend)
    functions, lacks = module.KERNELS, set(module.lacks()) if hasattr(module, "lacks") else set()

    def lacking(rules: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(name for name in rules.get("instruction_sets", ()) if name in lacks)

    return [
        Kernel(rules, ALIASES.get(op, (op,)), functions[rules["kernel_id"]], lacking(rules))
        for op, listed in document(backend)["ops"].items()
        for rules in listed
    ]


@dataclass
class Case:
    """A case of testdata/."""

    op: str
    name: str
    layout: str | None
    dtypes: dict[str, str]
    tensors: dict[str, dict[str, Any]]
    params: dict[str, Any]
    expect: dict[str, dict[str, Any]] | None
    dims: dict[str, int] = field(default_factory=dict)

    def inputs(self) -> dict[str, Tensor]:
        """Fresh tensors that lie in memory as the case says."""
        return {name: _tensor(stored) for name, stored in self.tensors.items()}


def _numbers(data: list[Any]) -> list[Any]:
    return [float(x) if isinstance(x, str) else x for x in data]


def _packed(stored: Mapping[str, Any]) -> Tensor:
    numbers = torch.tensor(_numbers(stored["data"]), dtype=torch.float64)
    if "strides" in stored:
        numbers = numbers.as_strided(stored["shape"], stored["strides"], stored["offset"])
    table = torch.tensor(FOUR_BIT[stored["dtype"]], dtype=torch.float64)
    # Zero has two codes, of which the sign tells.
    same = (numbers[..., None] == table) & (numbers[..., None].signbit() == table.signbit())
    codes = same.to(torch.uint8).argmax(-1).to(torch.uint8).reshape(stored["shape"])
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpacked(values: Tensor, dtype: str) -> Tensor:
    """The numbers of a packed tensor."""
    codes = torch.stack((values & 15, values >> 4), -1).flatten(-2).long()
    return torch.tensor(FOUR_BIT[dtype], dtype=torch.float64)[codes]


def _tensor(stored: Mapping[str, Any]) -> Tensor:
    if stored["dtype"] in FOUR_BIT:
        return _packed(stored)
    dtype = DTYPES[stored["dtype"]]
    exact = torch.float64 if dtype.is_floating_point else torch.int64
    buffer = torch.tensor(_numbers(stored["data"]), dtype=exact).to(dtype)
    if "strides" in stored:
        return buffer.as_strided(stored["shape"], stored["strides"], stored["offset"])
    return buffer.reshape(stored["shape"])


@cache
def cases(op: str) -> list[Case]:
    """The cases of an operation, without those of four-bit tensors that do not fill their bytes."""
    parsed = json.loads((ROOT / "testdata" / "ops" / f"{op}.json").read_text(encoding="utf-8"))
    found = []
    for case in parsed["cases"]:
        params = dict(case["params"])
        if case["call"] in FIXED_BY_ALIAS:
            params["causal"] = FIXED_BY_ALIAS[case["call"]]
        dtypes = {name: stored["dtype"] for name, stored in case["inputs"].items()}
        if any(one["dtype"] in FOUR_BIT and one["shape"][-1] % 2 for one in case["inputs"].values()):
            continue
        dense = op in (*DENSE, *ALIASES["attention.cross"], "attention.lse")
        otherwise = "NHD" if op.endswith(".paged") else "BSHD" if dense else None
        layout = case["layout"] or LAYOUT_WHEN_NOT_SAID.get(op, otherwise)
        one = Case(op, case["name"], layout, dtypes, case["inputs"], params, case.get("expect"))
        one.dims = _dims(one)
        found.append(one)
    return found


def _dims(case: Case) -> dict[str, int]:
    dims: dict[str, int] = {}
    for name, patterns in SHAPES.get(case.op, {}).items():
        shape = case.tensors[name]["shape"]
        for pattern in patterns.split("|"):
            tag, colon, axes = pattern.rpartition(":")
            if axes.startswith("..."):
                rows, last = axes.removeprefix("...").split()
                dims.update({rows: math.prod(shape[:-1]), last: shape[-1]})
                continue
            if len(axes.split()) == len(shape) and (not colon or tag.strip() == case.layout):
                dims.update({axis: size for axis, size in zip(axes.split(), shape, strict=True) if axis != "1"})
    return dims


# Kernels that compute attention in one.
FUSED = ("torch.sdpa.", "torch.any.", "zentorch.sdpa")
# What flash kernels ask for, since with fewer keys they lose a NaN.
KEYS_THAT_KEEP_A_NAN = 16
# From how many rows on it pays to unpack a weight: of float16, and of float32.
ROWS_THAT_PAY = (96, 2048)


def reason_to_skip(kernel: Kernel, case: Case) -> str | None:
    """Why a kernel does not take a case, if it does not: what the engine would say, in short."""
    rules = kernel.rules
    if kernel.id.startswith(FUSED) and case.name.startswith("nan"):
        return "fused kernels multiply what gets no weight by zero; another test holds their NaN to what they keep"
    named = {"BSHD", "BHSD", "NHD", "HND"} & set(rules["requires_layouts"])
    dense = case.op in (*DENSE, *ALIASES["attention.cross"], "attention.lse")
    layout = "BSHD" if case.layout is None and dense else case.layout
    if layout is not None and named and layout not in named:
        return "layout"
    for name, rule in rules.get("inputs", {}).items():
        if rule.get("required") and name not in case.dtypes:
            return f"no {name}"
    for name, dtype in case.dtypes.items():
        rule = rules.get("inputs", {}).get(name)
        optional = name in OPTIONAL or (name in {"weight", "bias", "scale"} and case.op not in {"embedding.lookup"})
        required = {
            ("weight", "mlp.linear"),
            ("weight", "mlp.linear.packed"),
            ("weight", "mlp.linear.quantized"),
            ("qo_indptr", "attention.mla.prefill.paged"),
        }
        optional = optional and (name, case.op) not in required
        if optional and rule is None:
            return f"input {name}"
        allowed = (rule or {}).get("dtypes")
        if allowed is None and name in CACHES:
            allowed = rules.get("supports_kv_cache_dtypes")
        holds_data = dtype in FLOATS or dtype.startswith("float8") or dtype in ("int8", *FOUR_BIT)
        if allowed is None and holds_data and name != "attn_mask":
            allowed = rules["dtypes"]
        if allowed is not None and dtype not in allowed:
            return f"dtype of {name}"
    for name, value in case.params.items():
        rule = rules.get("params", {}).get(name)
        if rule is None and name not in UNIVERSAL and value != DEFAULTS[name]:
            return f"parameter {name}"
        if rule and "one_of" in rule and value not in rule["one_of"]:
            return f"parameter {name}"
    for name, rule in rules.get("dims", {}).items():
        least = rule.get("min", 0)
        if name == "seq_k" and least == KEYS_THAT_KEEP_A_NAN:
            # The cases are shorter than that, and all that goes wrong below is a NaN.
            least = 1
        if name == "rows" and least in ROWS_THAT_PAY:
            # The cases are smaller: with more rows a kernel is faster, and computes the same.
            least = 1
        if name in case.dims and (case.dims[name] < least or case.dims[name] % rule.get("multiple_of", 1)):
            return f"dimension {name}"
    if not rules.get("supports_gqa", False) and case.dims.get("heads") != case.dims.get("kv_heads"):
        return "shared key/value heads"
    for condition in rules.get("conditions", []):
        if not eval(condition, {"__builtins__": {}}, _Scope(case)):
            return str(condition)
    return None


class _Scope(dict[str, Any]):
    """The names a condition may use; an input is an object with `present` and `dtype`."""

    def __init__(self, case: Case) -> None:
        super().__init__({**DEFAULTS, **case.params, **case.dims})
        self._dtypes = case.dtypes

    def __missing__(self, name: str) -> Any:
        if name == "context":
            return SimpleNamespace(requires_grad=False)
        if name in DTYPES:
            return name
        return SimpleNamespace(present=name in self._dtypes, dtype=self._dtypes.get(name, ""))


def arguments(kernel: Kernel, case: Case, inputs: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """What the kernel's function is called with."""
    for name in inspect.signature(kernel.run).parameters:
        if name in inputs:
            tensor = inputs[name]
            strided = kernel.rules.get("requires_last_dim_stride1") and tensor.dim() and tensor.stride(-1) != 1
            if strided or kernel.rules["requires_layouts"] == ["contiguous"]:
                # The engine hands a copy over.
                tensor = tensor.contiguous()
            yield name, tensor
        elif name == "layout":
            yield name, case.layout
        elif name in case.params:
            yield name, case.params[name]
        elif name == "dtype":
            yield name, "float32"
        elif name == "eps":
            yield name, 1e-5 if case.op == "norm.layer" else 1e-6
        else:
            yield name, OWN_DEFAULTS.get((case.op, name), DEFAULTS.get(name))


def difference(got: Tensor, expected: Mapping[str, Any], first: str | None = None) -> str | None:
    """How a result is wrong, if it is. `first`: the dtype of the first input, if a wider result is no more exact than that."""
    if expected["dtype"] in FOUR_BIT and got.dtype == torch.uint8:
        expected, got = {**expected, "dtype": "float64"}, unpacked(got, expected["dtype"])
    dtype = DTYPES[expected["dtype"]]
    if got.dtype != dtype:
        return f"dtype {got.dtype}, expected {dtype}"
    if list(got.shape) != expected["shape"]:
        return f"shape {list(got.shape)}, expected {expected['shape']}"
    values = got.double().reshape(-1).tolist()
    tolerance = 0.0 if expected.get("exact") else TOLERANCES.get(dtype, 0.0)
    if first is not None:
        tolerance = max(tolerance, TOLERANCES[DTYPES[first]])
    for place, (value, wanted) in enumerate(zip(values, _numbers(expected["data"]), strict=True)):
        if math.isnan(wanted) and math.isnan(value) or value == wanted:
            continue
        if not abs(value - wanted) <= tolerance + tolerance * abs(wanted):
            return f"{value} at {place}, expected {wanted}"
    return None


def run(kernel: Kernel, case: Case, place: str | None = None) -> list[str]:
    """Runs a case, on the CPU or another device, and says what is wrong with it."""
    inputs = case.inputs() if place is None else {name: moved(t, place) for name, t in case.inputs().items()}
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    call = dict(arguments(kernel, case, inputs))
    if case.expect is None:
        try:
            kernel.run(**call)
        except ValueError as error:
            code = getattr(error, "code", None)
            return [] if code == "BAD_DATA" else [f"the error has the code {code}"]
        return ["bad data was accepted"]
    result = kernel.run(**call)
    updated = {name for name in case.expect if name in inputs}
    problems = [
        f"{name} was written to" for name, was in before.items() if name not in updated and not same(inputs[name], was)
    ]
    if updated:
        outputs = {name: inputs[name] for name in updated}
    else:
        results = result if isinstance(result, tuple) else (result,)
        outputs = dict(zip(case.expect, results, strict=True))
    for name, expected in case.expect.items():
        if place is not None and str(outputs[name].device) != place:
            problems.append(f"{name}: on {outputs[name].device}")
        first = next(iter(case.dtypes.values())) if name == "lse" else None
        wrong = difference(outputs[name].cpu(), expected, first)
        if wrong is not None:
            problems.append(f"{name}: {wrong}")
    return problems


def moved(tensor: Tensor, place: str) -> Tensor:
    """A copy on another device that lies in memory as the tensor does."""
    size = (
        sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
    )
    buffer = tensor.as_strided((size,), (1,)).to(place)
    return buffer.as_strided(tensor.shape, tensor.stride())


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same, NaN included."""
    return torch.equal(a.double().nan_to_num(12345.0), b.double().nan_to_num(12345.0))
