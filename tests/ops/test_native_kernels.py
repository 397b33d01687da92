"""The native kernels beyond `rms_norm`, called from Python: right on any memory, and what torch must know of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import layerzero as lz
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: One step of the result's dtype, relative, and what sums of numbers around 1 are off.
STEP = {torch.float32: (1e-6, 2e-6), torch.float16: (1.1e-3, 1e-5), torch.bfloat16: (8e-3, 1e-5)}
OPS = {
    "rope": "posenc.rope",
    "silu_mul": "activation.silu_mul",
    "add_rms_norm": "norm.fused_add_rms",
    "quantize": "quantize",
    "kv_append": "kv_cache.append",
}
NAMES = [
    name if isa == "" else f"{name}.{isa}"
    for name in OPS
    for isa in ("", "avx2", "avx512")
    if isa == "" or name != "kv_append"
]


@pytest.fixture(params=NAMES)
def kernel(restored: None, request: pytest.FixtureRequest) -> Iterator[str]:
    """Each native kernel in turn, as the one that serves; those this CPU cannot run are skipped."""
    name: str = request.param
    listed = {kernel.kernel_id: kernel.available for kernel in lz.list_kernels()}
    if not listed[f"lz_cpu.{name}"]:
        pytest.skip("this CPU lacks the instructions")
    op = OPS[name.partition(".")[0]]
    lz.force_kernel(op, f"lz_cpu.{name}")
    yield name.partition(".")[0]
    lz.unforce_kernel(op)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers around 1, in memory of their own with a gap after each row."""
    make = torch.Generator().manual_seed(seed)
    padded = torch.randn(*shape[:-1], shape[-1] + seed % 3, generator=make).to(dtype)
    return padded[..., : shape[-1]]


def near(got: Tensor, want: Tensor) -> None:
    rtol, atol = STEP[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


def _rope(seed: int, dtype: torch.dtype, table: torch.dtype) -> None:
    x, layout = drawn(seed, 2, 5, 3, 64, dtype=dtype), ("BSHD", "BHSD")[seed % 2]
    seq = 5 if layout == "BSHD" else 3
    cos, sin = drawn(seed + 1, 9, 32, dtype=table), drawn(seed + 2, 9, 32, dtype=table)
    positions = torch.tensor([[(3 * s + b) % 9 for s in range(seq)] for b in range(2)])
    interleaved = seed % 5 < 2
    got = lz.rope(x, cos, sin, interleaved, positions=positions, layout=layout)
    wide, axis = x.double(), -2 if layout == "BSHD" else -3
    c, s = (one.double()[positions].unsqueeze(axis) for one in (cos, sin))
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = first * c - second * s, second * c + first * s
    near(got, torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1))


def _silu_mul(seed: int, dtype: torch.dtype, _: torch.dtype) -> None:
    # The two halves of one projection, as models have them.
    gate, up = drawn(seed, 4, 2 * 600, dtype=dtype).mul(4.0).chunk(2, -1)
    near(lz.silu_mul(gate, up), F.silu(gate.double()) * up.double())


def _add_rms_norm(seed: int, dtype: torch.dtype, weight: torch.dtype) -> None:
    x, residual = drawn(seed, 3, 700, dtype=dtype), drawn(seed + 1, 3, 700, dtype=dtype)
    w = drawn(seed + 2, 700, dtype=weight)
    got, summed = lz.fused_add_rms_norm(x, residual, w, 1e-5)
    total = x.double() + residual.double()
    near(summed, total)
    near(got, total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double())


def _quantize(seed: int, dtype: torch.dtype, _: torch.dtype) -> None:
    x, granularity = drawn(seed, 3, 700, dtype=dtype), ("per_tensor", "per_channel")[seed % 2]
    for name, kind, largest in (("int8", torch.int8, 127.0), ("fp8_e4m3", torch.float8_e4m3fn, 448.0)):
        values, scales, zero_points = lz.quantize(x, name, granularity=granularity)
        wide = x.double()
        most = wide.abs().amax() if granularity == "per_tensor" else wide.abs().amax(-1, keepdim=True)
        wanted = (most / largest).float()
        assert torch.equal(scales.flatten(), wanted.flatten()) and not zero_points.any()
        units = wide / wanted.double()
        assert values.dtype == kind and values.shape == x.shape
        # Half a step of an integer; of a float with three bits of mantissa a sixteenth, and half of its least step.
        allowed = 0.5 if name == "int8" else units.abs().mul(1 / 16).clamp(min=2.0**-10)
        assert ((values.double() - units).abs() <= allowed * (1 + 1e-9)).all()


def _kv_append(seed: int, dtype: torch.dtype, stored: torch.dtype) -> None:
    layout, shape = ("NHD", (6, 4, 2, 16)) if seed % 2 else ("HND", (6, 2, 4, 16))
    # Keys and values of a page beside each other, as servers keep them.
    both = torch.zeros(6, 2, *shape[1:]).to(stored)
    caches = both[:, 0], both[:, 1]
    key, value = drawn(seed, 5, 2, 16, dtype=dtype), drawn(seed + 1, 5, 2, 16, dtype=dtype)
    slots = torch.tensor([7, -1, 23, 0, 7], dtype=(torch.int64, torch.int32)[seed % 3 == 0])
    lz.kv_append(key, value, *caches, slots, layout=layout)
    wanted = torch.zeros_like(both)
    for new, half in ((key, 0), (value, 1)):
        for token, slot in ((2, 23), (3, 0), (4, 7)):
            page, within = divmod(slot, 4)
            place = (page, half, within) if layout == "NHD" else (page, half, slice(None), within)
            wanted[place] = new[token].to(stored)
    assert torch.equal(both, wanted)


CALLS: dict[str, Callable[[int, torch.dtype, torch.dtype], None]] = {
    "rope": _rope,
    "silu_mul": _silu_mul,
    "add_rms_norm": _add_rms_norm,
    "quantize": _quantize,
    "kv_append": _kv_append,
}


def test_results_are_the_definitions(kernel: str) -> None:
    @examples(40)
    @given(seed=st.integers(0, 2**16), dtype=st.sampled_from(FLOATS), other=st.sampled_from(FLOATS))
    def run(seed: int, dtype: torch.dtype, other: torch.dtype) -> None:
        for _ in range(2):
            CALLS[kernel](seed, dtype, other)

    run()


def test_no_python_code_runs_between_the_call_and_the_kernel(kernel: str) -> None:
    x, cache = torch.randn(2, 3, 2, 16), torch.zeros(4, 4, 2, 16)
    table, slots = torch.randn(3, 8), torch.tensor([1, 2, 3])
    calls: dict[str, Callable[[], Any]] = {
        "rope": lambda: lz.rope(x, table, table),
        "silu_mul": lambda: lz.silu_mul(x, x),
        "add_rms_norm": lambda: lz.fused_add_rms_norm(x, x),
        "quantize": lambda: lz.quantize(x, "int8"),
        "kv_append": lambda: lz.kv_append(x[0], x[1], cache, torch.zeros_like(cache), slots),
    }
    other = torch.zeros_like(cache)
    calls["kv_append"] = lambda: lz.kv_append(x[0], x[1], cache, other, slots)
    for _ in range(3):
        calls[kernel]()
    seen: list[str] = []
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_name) if event == "call" else None)
    try:
        calls[kernel]()
    finally:
        sys.setprofile(None)
    # Torch is told that caches were written to by a function of its own.
    assert [name for name in seen if name != "<lambda>"] == (["increment_version"] if kernel == "kv_append" else [])


def test_torch_knows_that_a_cache_was_written_to(restored: None) -> None:
    lz.force_kernel("kv_cache.append", "lz_cpu.kv_append")
    weight = torch.ones(4, 4, 2, 16, requires_grad=True)
    cache, other, new = torch.zeros(4, 4, 2, 16), torch.zeros(4, 4, 2, 16), torch.ones(1, 2, 16)
    for _ in range(3):
        product = (weight * cache).sum()
        before = cache._version, other._version
        lz.kv_append(new, new, cache, other, torch.tensor([1]))
        assert (cache._version, other._version) == (before[0] + 1, before[1] + 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
    with torch.inference_mode():
        made = torch.zeros(4, 4, 2, 16), torch.zeros(4, 4, 2, 16)
        for _ in range(3):
            lz.kv_append(new, new, *made, torch.tensor([1]))
        assert made[0][0, 1].eq(1.0).all()
    lz.unforce_kernel("kv_cache.append")


def test_a_wrong_slot_leaves_the_cache_as_it_was(restored: None) -> None:
    lz.force_kernel("kv_cache.append", "lz_cpu.kv_append")
    caches, new = (torch.zeros(4, 4, 2, 16), torch.zeros(4, 4, 2, 16)), torch.ones(2, 2, 16)
    for _ in range(3):
        with pytest.raises(lz.InvalidCallError, match=r"slot_mapping\[1\] is 16, but the cache has 16 slots"):
            lz.kv_append(new, new, *caches, torch.tensor([0, 16]))
        assert not caches[0].any() and not caches[1].any()
    with pytest.raises(lz.InvalidCallError, match="shares memory"):
        lz.kv_append(new, new, caches[0], caches[0], torch.tensor([0, 1]))
    lz.unforce_kernel("kv_cache.append")
