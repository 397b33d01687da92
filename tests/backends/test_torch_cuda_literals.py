"""What torch's kernels for GPUs make of data that only the device sees: tokens without a slot, slots and pages that repeat or were
never written, queries that reach nothing, scales of nothing. On CPU tensors, against references in float64 or to the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import described
import layerzero as lz
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layerzero.backends._shared.torch_device_functions import caches, sdpa
from strategies import examples
from torch import Tensor

KERNELS: dict[str, Callable[..., Any]] = described.adapter("torch_cuda").KERNELS
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
seeds = st.integers(0, 2**32 - 1)


# --- caches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("few", [0, 1024], ids=["in a table", "in pairs"])
@examples(300)
@given(
    slots=st.lists(st.integers(-3, 11), min_size=1, max_size=12),
    layout=st.sampled_from(("NHD", "HND")),
    index=st.sampled_from((torch.int32, torch.int64)),
    stored=st.sampled_from((torch.float32, torch.bfloat16, torch.float8_e4m3fn)),
    seed=seeds,
)
def test_the_last_token_of_a_slot_is_written_and_padding_is_not(
    few: int, slots: list[int], layout: str, index: torch.dtype, stored: torch.dtype, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(len(slots), 2, 4, generator=make) for _ in range(2))
    shape = (3, 4, 2, 4) if layout == "NHD" else (3, 2, 4, 4)
    keys, values = (torch.randn(shape, generator=make).to(stored) for _ in range(2))
    want = keys.clone(), values.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            for cache, new in zip(want, (key, value), strict=True):
                pages = cache if layout == "NHD" else cache.transpose(1, 2)
                pages[slot // 4, slot % 4] = new[token].to(stored)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches, "_FEW", few)
        KERNELS["torch.cuda.kv_append"](key, value, keys, values, torch.tensor(slots, dtype=index), layout)
    for got, right in zip((keys, values), want, strict=True):
        assert torch.equal(got.float(), right.float())


# --- pages ------------------------------------------------------------------------------------------------------------


@examples(150)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    window=st.sampled_from((-1, 0, 3, 100)),
    layout=st.sampled_from(("NHD", "HND")),
    turned=st.booleans(),
    seed=seeds,
)
def test_pages_beyond_a_context_are_not_read(
    lengths: list[int], window: int, layout: str, turned: bool, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    batch, heads, kv_heads, dim, size, per = len(lengths), 4, 2, 8, 4, 3
    query = torch.randn(batch, heads, dim, generator=make, dtype=torch.float64)
    keys, values = (
        torch.randn(batch * per, size, kv_heads, dim, generator=make, dtype=torch.float64) for _ in range(2)
    )
    tables = torch.randperm(batch * per, generator=make).view(batch, per).to(torch.int32)
    want = torch.zeros_like(query)
    written = torch.zeros(batch * per, size, dtype=torch.bool)
    for i, length in enumerate(lengths):
        places = [(int(tables[i, t // size]), t % size) for t in range(length)]
        for page, slot in places:
            written[page, slot] = True
        for head in range(heads if length else 0):
            seen = places[max(length - 1 - window, 0) :] if window >= 0 else places
            k = torch.stack([keys[page, slot, head // 2] for page, slot in seen])
            v = torch.stack([values[page, slot, head // 2] for page, slot in seen])
            want[i, head] = torch.softmax(k @ query[i, head] / math.sqrt(dim), 0) @ v
        # What no token needs is no page.
        tables[i, -(-length // size) :] = torch.tensor([-7, 2**31 - 1, 99])[: per - -(-length // size)]
    keys[~written] = values[~written] = math.nan
    if turned:
        tables = tables.t().contiguous().t()
    if layout == "HND":
        keys, values = keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()
    for name in ("torch.cuda.paged.sdpa.decode.gqa", "torch.cuda.paged.unfused.decode.gqa"):
        lens = torch.tensor(lengths, dtype=torch.int32)
        capped = {"softcap": 0.0, "sinks": None} if "unfused" in name else {}
        given = {"scale": None, "window_left": window, "layout": layout, **capped}
        got = KERNELS[name](query, keys, values, tables, lens, **given)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


# --- masks ------------------------------------------------------------------------------------------------------------


@examples(150)
@given(
    shape=st.sampled_from(((2, 1, 1, 16), (2, 1, 5, 16), (1, 4, 5, 16), (5, 16), (2, 1, 1, 13))),
    share=st.sampled_from((0.0, 0.1, 0.6, 1.0)),
    words=st.booleans(),
    layout=st.sampled_from(("BHSD", "BSHD")),
    seed=seeds,
)
def test_queries_that_reach_nothing_give_zeros(
    shape: tuple[int, ...], share: float, words: bool, layout: str, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    seq = shape[-1]
    q, k, v = (torch.randn(2, 4, n, 8, generator=make, dtype=torch.float64) for n in (5, seq, seq))
    mask = torch.rand(shape, generator=make) < share
    full = mask.expand(2, 4, 5, seq)
    scores = (q @ k.transpose(2, 3) / math.sqrt(8)).masked_fill(~full, -math.inf)
    want = scores.softmax(-1).nan_to_num(0.0) @ v
    given_as = [one if layout == "BHSD" else one.transpose(1, 2).contiguous() for one in (q, k, v)]
    added = torch.zeros(shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "_LARGE_MASK", 1 if words else 1 << 20)
        for form in (mask, added):
            got = KERNELS["torch.cuda.sdpa.literal"](*given_as, form, False, None, 0.0, 0, layout)
            got = got if layout == "BHSD" else got.transpose(1, 2)
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


# --- 8 bits -----------------------------------------------------------------------------------------------------------

NUMBERS = (
    0.0,
    -0.0,
    1.0,
    -3.5,
    127.0,
    448.0,
    math.nan,
    math.inf,
    -math.inf,
    2.0**-149,
    2.0**-133,
    -180 * 2.0**-149,
    1e-38,
    3e38,
)


@examples(400)
@given(
    rows=st.lists(
        st.lists(
            st.one_of(st.sampled_from(NUMBERS), st.floats(width=32), st.floats(-2.0, 2.0, width=32)),
            min_size=3,
            max_size=3,
        ),
        min_size=1,
        max_size=4,
    ),
    form=st.sampled_from(("int8", "fp8_e4m3", "fp8_e5m2")),
    granularity=st.sampled_from(("per_channel", "per_tensor")),
    dtype=st.sampled_from(FLOATS),
)
def test_numbers_of_all_kinds_are_quantized_to_the_last_bit(
    rows: list[list[float]], form: str, granularity: str, dtype: torch.dtype
) -> None:
    same_to_the_last_bit(torch.tensor(rows, dtype=torch.float64).to(dtype), form, granularity)


@examples(200)
@given(
    top=st.floats(0.5, 2.0, width=32),
    power=st.integers(-40, 40),
    middles=st.lists(st.integers(0, 126), min_size=8, max_size=8),
    exponents=st.lists(st.integers(-12, 3), min_size=8, max_size=8),
    form=st.sampled_from(("int8", "fp8_e4m3", "fp8_e5m2")),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_a_tie_is_one_only_if_it_really_is(
    top: float, power: int, middles: list[int], exponents: list[int], form: str, dtype: torch.dtype
) -> None:
    """Numbers at and beside the middle between two of the format's."""
    largest, digits = {"int8": (127.0, 0), "fp8_e4m3": (448.0, 8), "fp8_e5m2": (57344.0, 4)}[form]
    high = torch.tensor(top * 2.0**power)
    scale = (high.double() / largest).float().double()
    if digits:
        units = torch.tensor([(digits + m % digits + 0.5) * 2.0**e for m, e in zip(middles, exponents, strict=True)])
    else:
        units = torch.tensor(middles) + 0.5
    at = (units.double() * scale).float()
    near = torch.cat((high[None], at, -at, at.nextafter(torch.tensor(0.0)), at.nextafter(high)))
    same_to_the_last_bit(near.clamp(-high, high).to(dtype)[None], form, "per_channel")


def same_to_the_last_bit(x: Tensor, form: str, granularity: str) -> None:
    got = KERNELS["torch.cuda.quantize"](x, None, form, granularity, None, False)
    want = lz.run_kernel("lz_cpu.ref.quantize", x, form, granularity=granularity)
    for one, right in zip(got, want, strict=True):
        assert one.dtype == right.dtype and one.shape == right.shape
        same = one.view(torch.uint8) == right.view(torch.uint8)
        if right.dtype.itemsize == 1 and right.is_floating_point():
            same |= one.float().isnan() & right.float().isnan()
        assert bool(same.all()), (one, right)


@examples(200)
@given(
    kind=st.sampled_from((torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)),
    granularity=st.sampled_from(("per_channel", "per_tensor", "blockwise")),
    offset=st.booleans(),
    result=st.sampled_from(("float32", "float64", "bfloat16", "float16")),
    turned=st.booleans(),
    seed=seeds,
)
def test_the_way_back(kind: torch.dtype, granularity: str, offset: bool, result: str, turned: bool, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (6, 24), generator=make)
    values = values.to(torch.int8) if kind == torch.int8 else (values / 16).to(kind)
    shape = {"per_channel": (6, 1), "per_tensor": (1, 1), "blockwise": (6, 3)}[granularity]
    scales = torch.rand(shape, generator=make)
    zeros = torch.randint(-100, 100, shape, generator=make, dtype=torch.int32) if offset else None
    if turned:
        values = values.t().contiguous().t()
    got = KERNELS["torch.cuda.dequantize"](values, scales, zeros, result, granularity, 8)
    each = scales.double().repeat_interleave(24 // shape[1], 1)
    less = 0.0 if zeros is None else zeros.double().repeat_interleave(24 // shape[1], 1)
    want = (values.float().double() - less) * each
    close = {"float64": 1e-15, "float32": 1e-6, "float16": 2e-3, "bfloat16": 8e-3}[result]
    assert got.dtype == getattr(torch, result) and got.shape == values.shape
    torch.testing.assert_close(got.double(), want, rtol=close, atol=1e-6 if result == "float16" else 0.0)


# --- positions --------------------------------------------------------------------------------------------------------


@examples(200)
@given(
    layout=st.sampled_from(("BSHD", "BHSD", "NHD")),
    pairs=st.sampled_from((1, 2, 4, 8)),
    interleaved=st.booleans(),
    at_positions=st.booleans(),
    turned=st.booleans(),
    dtype=st.sampled_from((*FLOATS, torch.float64)),
    tables=st.sampled_from((None, torch.float32)),
    seed=seeds,
)
def test_pairs_are_turned_and_rounded_once(
    layout: str,
    pairs: int,
    interleaved: bool,
    at_positions: bool,
    turned: bool,
    dtype: torch.dtype,
    tables: torch.dtype | None,
    seed: int,
) -> None:
    make = torch.Generator().manual_seed(seed)
    shape = {"BSHD": (2, 5, 3, 8), "BHSD": (2, 3, 5, 8), "NHD": (5, 3, 8)}[layout]
    x = torch.randn(shape, generator=make).to(dtype)
    if turned:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    cos, sin = (torch.randn(9, pairs, generator=make).to(tables or dtype) for _ in range(2))
    count = 4 if pairs == 8 else pairs
    positions = torch.randint(0, 9, (5,) if layout == "NHD" else (2, 5), generator=make) if at_positions else None
    rows = torch.arange(5) if positions is None else positions
    a, b = (one.double()[rows][..., :count] for one in (cos, sin))
    heads = 1 if layout == "BHSD" and a.dim() == 3 else 0 if layout == "BHSD" else -2
    a, b = (one.unsqueeze(heads) for one in (a, b))
    first, second = (
        (slice(0, 2 * count, 2), slice(1, 2 * count, 2)) if interleaved else (slice(count), slice(count, 2 * count))
    )
    want = x.double().clone()
    want[..., first] = x.double()[..., first] * a - x.double()[..., second] * b
    want[..., second] = x.double()[..., second] * a + x.double()[..., first] * b
    got = KERNELS["torch.cuda.rope"](x, cos, sin, positions, interleaved, layout)
    assert got.dtype == dtype and got.shape == x.shape
    # A rounding is half the distance of two numbers; what cancels was rounded in float32.
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps * 0.51, atol=2e-6)


def test_turning_has_gradients() -> None:
    x, cos, sin = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((1, 3, 2, 8), (3, 4), (3, 4)))
    for interleaved in (False, True):
        assert torch.autograd.gradcheck(
            lambda *given: KERNELS["torch.cuda.rope"](*given, None, interleaved, "BSHD"),  # noqa: B023
            (x, cos, sin),
        )
