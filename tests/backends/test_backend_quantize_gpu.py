"""Quantization on a GPU, 4-bit formats included: what is declared, put to the engine; what is computed, to the last bit
what the reference gives: plain torch on any device, our kernels in Triton's interpreter and on a device."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import described
import layerzero as lz
import pytest
import torch
from described import adapter
from processes import SUPPORT, forked
from torch import Tensor

FOUR_BIT = ("int4", "mxfp4", "nvfp4")
FORMATS = ("int8", "fp8_e4m3", "fp8_e5m2", *FOUR_BIT)
GROUPS = {"mxfp4": 32, "nvfp4": 16}
TRITON = find_spec("triton") is not None
VERSIONS = {"torch_cuda": torch.__version__, **({"triton": "3.6.0"} if TRITON else {})}
PREFIXES = ("torch.cuda", "triton") if TRITON else ("torch.cuda",)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As if a device were here."""
    with ExitStack() as stack:
        for backend, version in VERSIONS.items():
            stack.enter_context(described.registered(backend, version))
        yield


# --- what is declared -------------------------------------------------------------------------------------------------

INPUT: dict[str, tuple[int, ...]] = {"input": (8, 256)}
BLOCKS = ("--param", "granularity=blockwise")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    ("form", "shapes", "flags", "reason"),
    [
        ("mxfp4", INPUT, BLOCKS, None),
        ("nvfp4", INPUT, (*BLOCKS, "--capturing", "--deterministic"), None),
        ("int4", INPUT, (*BLOCKS, "--param", "group_size=128", "--param", "zero_point=true"), None),
        ("int4", {**INPUT, "scale": (8, 1)}, ("--param", "granularity=per_channel"), None),
        ("int4", {"input": (8, 255)}, BLOCKS, "[CONSTRAINT_FAILED] cols"),
        ("int8", INPUT, BLOCKS, "["),
    ],
)
def test_rounding_that_is_declared(
    prefix: str, form: str, shapes: Any, flags: tuple[str, ...], reason: str | None
) -> None:
    others = {"scale": "float32"} if "scale" in shapes else {}
    asked = (*flags, "--param", f"dtype={form}")
    reasons = described.ask("quantize", "h200", shapes, "bfloat16", *asked, dtypes=others)[f"{prefix}.quantize.packed"]
    assert not reasons if reason is None else any(line.startswith(reason) for line in reasons), reasons


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("form", FOUR_BIT)
def test_the_way_back_that_is_declared(prefix: str, form: str) -> None:
    """Each format has a kernel of its own: that is how it is told which one it is."""
    shapes = {"values": (8, 256), "scales": (8, 256 // GROUPS.get(form, 32))}
    flags = (*BLOCKS, "--capturing", "--param", "dtype=bfloat16")
    found = described.ask("dequantize", "h200", shapes, form, *flags, dtypes={"scales": "float32"})
    assert described.takes(found, prefix) == [f"{prefix}.dequantize.{form}"]


# --- what is computed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call of `quantize`, and what becomes of its result."""

    form: str
    granularity: str
    group_size: int | None
    zero_point: bool
    input: Tensor
    scale: Tensor | None
    result: str

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As kernels take them."""
        return self.input, self.scale, self.form, self.granularity, self.group_size, self.zero_point


def numbers(draw: random.Random, rows: int, columns: int) -> Tensor:
    """Of all kinds: ties, groups of zeros, the ends of float32, and what is no number."""
    x = torch.randn(rows, columns)
    kind = draw.choice(("plain", "coarse", "small", "tiny", "huge", "special", "zeros"))
    if kind == "coarse":
        return torch.round(x * 4.0) / 4.0
    if kind == "special":
        lot = torch.rand(rows, columns)
        for low, high, value in (
            (0.0, 0.05, math.nan),
            (0.9, 0.92, -math.inf),
            (0.98, 1.0, math.inf),
            (0.5, 0.6, -0.0),
        ):
            x[(lot >= low) & (lot < high)] = value
        return x
    if kind == "zeros":
        return x.masked_fill(torch.rand(rows, columns) < 0.5, 0.0).index_fill(1, torch.arange(columns // 2), 0.0)
    powers = {"small": (-12,), "tiny": (-130, -145), "huge": (12, 100, 126)}.get(kind, (0,))
    return x * 2.0 ** draw.choice(powers)


def calls(count: int, dtypes: tuple[torch.dtype, ...], results: tuple[str, ...]) -> Iterator[Call]:
    """Calls at random."""
    for number in range(count):
        draw = random.Random(number)
        torch.manual_seed(number)
        form = FORMATS[number % len(FORMATS)]
        granularity = "blockwise" if form in GROUPS else draw.choice(("per_tensor", "per_channel", "blockwise"))
        size = draw.choice((None, 1, 3, 8, 24, 128)) if granularity == "blockwise" and form not in GROUPS else None
        rows, columns = draw.choice((1, 2, 5)), draw.choice((2, 6, 32, 34, 100, 256))
        if granularity == "per_channel" and draw.random() < 0.2:
            rows, columns = 2, 20000
        x = numbers(draw, rows, columns).to(draw.choice(dtypes))
        if draw.random() < 0.2:
            x = x.t().contiguous().t()
        offset = form in ("int8", "int4") and draw.random() < 0.3
        scale = None
        if not offset and draw.random() < 0.3:
            group = (size or GROUPS.get(form, 32)) if granularity == "blockwise" else columns
            full = (
                1 if granularity == "per_tensor" else rows,
                -(-columns // group) if granularity == "blockwise" else 1,
            )
            sizes = draw.choice((full, (1,), full[:1]))
            scale = draw.choice(
                (torch.rand(sizes) + 0.01, torch.zeros(sizes), -torch.rand(sizes), 2.0**-130 * torch.rand(sizes))
            )
        yield Call(form, granularity, size, offset, x, scale, draw.choice(results))


def wrong(name: str, got: Tensor, want: Tensor) -> list[str]:
    """What is wrong with a result: it is the reference's to the last bit, but for the bits of a NaN."""
    got = got.cpu()
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return [f"{name} is {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    same = got.contiguous().view(bits) == want.contiguous().view(bits)
    if want.is_floating_point():
        same |= got.float().isnan() & want.float().isnan()
    return [] if bool(same.all()) else [f"{name}: {int((~same).sum())} of {same.numel()} differ"]


def problems(
    kernels: dict[str, Callable[..., Any]], prefix: str, given: Iterator[Call], device: str = "cpu"
) -> list[str]:
    """What is wrong with the kernels of a backend."""
    found = []
    for number, call in enumerate(given):
        packed = call.form in FOUR_BIT
        rest = {"granularity": call.granularity, "group_size": call.group_size}
        right = lz.run_kernel(
            "lz_cpu.ref.quantize", call.input, call.form, call.scale, zero_point=call.zero_point, **rest
        )
        want = tuple(right) if call.scale is None else (right, None, None)
        placed = [one.to(device) if isinstance(one, Tensor) else one for one in call.arguments]
        got = kernels[f"{prefix}.quantize{'.packed' if packed else ''}"](*placed)
        lines = [
            w for one, other in zip(got, want, strict=True) if other is not None for w in wrong("quantize", one, other)
        ]
        scales = torch.rand(1) if want[1] is None else want[1]
        zeros = want[2] if call.zero_point else None
        form = {"format": call.form} if packed else {}
        back = lz.run_kernel("lz_cpu.ref.dequantize", want[0], scales, zeros, dtype=call.result, **rest, **form)
        run = kernels[f"{prefix}.dequantize{f'.{call.form}' if packed else ''}"]
        placed = [None if one is None else one.to(device) for one in (want[0], scales, zeros)]
        lines += wrong("dequantize", run(*placed, call.result, call.granularity, call.group_size), back)
        found += [f"{number} {call.form} {rest} {tuple(call.input.shape)} {call.input.dtype}: {line}" for line in lines]
    return found


def test_plain_torch_gives_what_the_reference_gives() -> None:
    """Narrower results are rounded twice there, and are left to the tolerance of other tests."""
    given = calls(240, (torch.float64, torch.float32, torch.float16, torch.bfloat16), ("float32", "float64"))
    wide = (call for call in given if call.form in FOUR_BIT)
    assert problems(adapter("torch_cuda").KERNELS, "torch.cuda", wide) == []


def interpreted(count: int) -> list[str]:
    """What the interpreter finds wrong. It truncates where it makes bfloat16, and has no subnormal numbers of it."""
    from interpreting import interpret

    interpret()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = calls(count, (torch.float32, torch.float16), ("float32", "float16"))
        return problems(adapter("triton").KERNELS, "triton", given)


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
def test_our_kernels_give_what_the_reference_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = "import test_backend_quantize_gpu as t\nanswer(t.interpreted(180))"
    assert forked(code, path=[Path(__file__).parent, SUPPORT]) == []


def test_packed_values_go_through_the_engine() -> None:
    """Results are checked as bytes that hold two; values that do not lie row by row are served, the second time too."""
    fourbit = adapter("torch_cuda").fourbit
    kernel = {"requires_layouts": ["strided"], "priority": 90, "deterministic": True}
    params: dict[str, Any] = {"granularity": {}, "group_size": {}}
    scaled = {"inputs": {"scales": {"dtypes": ["float32"]}}, **kernel}
    document = {
        "schema_version": "1.0",
        "backend": "halves",
        "backend_version": "1",
        "platform": "cpu",
        "ops": {
            "quantize": [
                {
                    "kernel_id": "halves.q",
                    "dtypes": ["float32"],
                    "params": {"dtype": {"one_of": ["mxfp4"]}, **params},
                    **kernel,
                }
            ],
            "dequantize": [{"kernel_id": "halves.d", "dtypes": ["mxfp4"], "params": {"dtype": {}, **params}, **scaled}],
        },
    }

    def quantize(input: Tensor, dtype: str, granularity: str, group_size: int | None) -> Any:
        return fourbit.quantize(input, None, dtype, granularity, group_size, False)

    def dequantize(values: Tensor, scales: Tensor, dtype: str, granularity: str, group_size: int | None) -> Any:
        return fourbit.dequantize_mxfp4(values, scales, None, dtype, granularity, group_size)

    lz.register_backend(document, {"halves.q": quantize, "halves.d": dequantize})
    try:
        x = torch.randn(6, 64)
        values, scales, _ = lz.quantize(x, "mxfp4", granularity="blockwise")
        assert lz.which("quantize", x, "mxfp4", granularity="blockwise").kernel_id == "halves.q"
        assert values.shape == (6, 32) and values.dtype == torch.uint8
        want = lz.run_kernel("lz_cpu.ref.dequantize", values, scales, granularity="blockwise", format="mxfp4")
        turned = values.t().contiguous().t()
        back = {"granularity": "blockwise", "format": "mxfp4"}
        assert lz.which("dequantize", turned, scales, **back).kernel_id == "halves.d"
        for _ in range(3):
            assert torch.equal(lz.dequantize(turned, scales, **back), want)
    finally:
        for name in ("halves.q", "halves.d"):
            lz.unregister_kernel(name)


# --- on a device ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_device_gives_what_the_reference_gives(prefix: str) -> None:
    backend = "triton" if prefix == "triton" else "torch_cuda"
    results = ("float32", "float16", "bfloat16") if prefix == "triton" else ("float32", "float64")
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    assert problems(adapter(backend).KERNELS, prefix, calls(120, dtypes, results), "cuda") == []
