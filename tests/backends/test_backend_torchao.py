"""torchao: what is declared, put to the engine; what is called, on a function of the same signature."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType
from typing import Any

import described
import layerzero as lz
import pytest
import torch
from described import adapter
from torch import Tensor

VERSION = "0.19.0"
MODULE = "torchao.quantization.quant_primitives"
STORED = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
#: What was called: block sizes, the shape of the scales.
CALLED: list[tuple[tuple[int, ...], tuple[int, ...]]] = []


def dequantize_affine(
    input: Tensor,
    block_size: tuple[int, ...],
    scale: Tensor,
    zero_point: Tensor | None,
    input_dtype: torch.dtype,
    quant_min: float | None = None,
    quant_max: float | None = None,
    *,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """torchao/quantization/quant_primitives.py."""
    CALLED.append((block_size, tuple(scale.shape)))
    assert input.dtype == input_dtype and quant_min is None and quant_max is None and zero_point is None
    assert output_dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert len(block_size) == input.dim()
    split, after = [], []
    for block, size in zip(block_size, input.shape, strict=True):
        if block != size and block > 1:
            assert size % block == 0
            split += [size // block, block]
            after += [size // block, 1]
        else:
            split.append(size)
            after.append(size if block == 1 else 1)
    numbers = input.view(split).to(output_dtype, copy=True) * scale.view(after)
    return numbers.view(input.shape).to(output_dtype)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As if it were installed."""
    with described.registered("torchao", VERSION):
        yield


def install(monkeypatch: pytest.MonkeyPatch, **contents: Any) -> None:
    """Puts the library in place."""
    monkeypatch.setattr(metadata, "version", lambda _: VERSION)
    for name in ("torchao", "torchao.quantization", MODULE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[MODULE].__dict__.update(contents)


# --- what is declared -------------------------------------------------------------------------------------------------

ROWS: dict[str, tuple[int, ...]] = {"values": (8, 256), "scales": (8, 1)}
BLOCKS: dict[str, tuple[int, ...]] = {"values": (8, 256), "scales": (8, 8)}
RAGGED: dict[str, tuple[int, ...]] = {"values": (8, 250), "scales": (8, 8)}
OFFSET: dict[str, tuple[int, ...]] = {**ROWS, "zero_points": (8, 1)}


@pytest.mark.parametrize(
    ("shapes", "dtype", "flags", "params", "reason"),
    [
        (ROWS, "int8", (), {"granularity": "per_channel"}, None),
        (ROWS, "float8_e5m2", ("--deterministic",), {"granularity": "per_channel"}, None),
        (BLOCKS, "float8_e4m3fn", (), {"granularity": "blockwise"}, None),
        (BLOCKS, "int4", (), {"granularity": "blockwise"}, "[DTYPE_UNSUPPORTED]"),
        (RAGGED, "int8", (), {"granularity": "blockwise"}, "[CONSTRAINT_FAILED] cols % group == 0"),
        (OFFSET, "int8", (), {"granularity": "per_channel"}, "["),
        (ROWS, "int8", ("--param", "dtype=bfloat16"), {"granularity": "per_channel"}, "["),
        (ROWS, "int8", ("--capturing",), {"granularity": "per_channel"}, "[CUDA_GRAPH_UNSAFE]"),
    ],
)
def test_what_is_declared(
    shapes: Any, dtype: str, flags: tuple[str, ...], params: dict[str, str], reason: str | None
) -> None:
    others = {name: "int32" if name == "zero_points" else "float32" for name in shapes if name != "values"}
    answer = described.ask("dequantize", "h200", shapes, dtype, *flags, dtypes=others, **params)["torchao.dequantize"]
    assert not answer if reason is None else any(line.startswith(reason) for line in answer), answer


# --- what is called ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", STORED)
@pytest.mark.parametrize(
    ("shape", "scales", "granularity", "group_size", "block"),
    [
        ((4, 64), (1, 1), "per_tensor", None, (4, 64)),
        ((4, 64), (1,), "per_channel", None, (4, 64)),
        ((4, 64), (4, 1), "per_channel", None, (1, 64)),
        ((4, 64), (4,), "per_channel", None, (1, 64)),
        ((2, 3, 64), (6, 2), "blockwise", None, (1, 1, 32)),
        ((2, 3, 64), (6, 16), "blockwise", 4, (1, 1, 4)),
        ((3, 8), (3, 8), "blockwise", 1, (1, 1)),
        ((3, 8), (3,), "blockwise", 2, (1, 8)),
        ((8,), (1, 2), "blockwise", 4, (4,)),
    ],
)
def test_calls_are_right(
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    shape: tuple[int, ...],
    scales: tuple[int, ...],
    granularity: str,
    group_size: int | None,
    block: tuple[int, ...],
) -> None:
    install(monkeypatch, dequantize_affine=dequantize_affine)
    assert adapter("torchao").detect() == VERSION
    torch.manual_seed(0)
    values, scale = torch.randint(0, 256, shape, dtype=torch.uint8).view(STORED[form]), torch.rand(scales)
    want = lz.run_kernel(
        "lz_cpu.ref.dequantize", values, scale, granularity=granularity, group_size=group_size, dtype="float32"
    )
    run = adapter("torchao").KERNELS["torchao.dequantize"]
    arguments = (values, scale, granularity, group_size)
    function, given, named = run.direct(*arguments)
    CALLED.clear()
    for got in (run(*arguments), function(*given, **named)):
        assert torch.equal(got.nan_to_num(-1.0), want.nan_to_num(-1.0)) and torch.equal(got.isnan(), want.isnan())
    assert CALLED == [(block, scales)] * 2


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(ImportError, match="dequantize_affine"):
        adapter("torchao").detect()
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(ImportError, match="torchao.* cannot be imported"):
        adapter("torchao").detect()
