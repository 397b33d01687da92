"""The torch backend's alternatives where they leave the plain path: many pieces, ties, bins, and what rounding takes.

That every kernel gives what the definition says is what the tests of each family hold them to; these cases are the ones
small tensors do not reach.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import adapter_cases
import numpy as np
import pytest
import reference
import torch
from adapter_cases import TOLERANCES
from hypothesis import given
from hypothesis import strategies as st
from strategies import array, examples
from torch import Tensor

KERNELS: dict[str, Callable[..., Any]] = adapter_cases.adapter("torch").KERNELS
blocks, position, selection = (
    importlib.import_module(f"{adapter_cases.PACKAGE}.backends._shared.{name}")
    for name in ("blocks", "torch_functions.position", "torch_functions.selection")
)
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(params=[1, 7, 64, 1000])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many elements a piece has: so few that every tensor is cut."""
    for module in (blocks, position):
        monkeypatch.setattr(module, "ELEMENTS", request.param)
    yield request.param


def holds(got: Tensor, want: reference.Answer) -> None:
    """A result is within its dtype's tolerance of the reference."""
    tolerance = TOLERANCES[got.dtype]
    np.testing.assert_allclose(array(got), want.values, rtol=tolerance, atol=tolerance)


# --- pieces -----------------------------------------------------------------------------------------------------------


@examples(200)
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    whole=st.integers(0, 2),
    elements=st.integers(1, 40),
    data=st.data(),
)
def test_pieces_are_everything_once_and_never_too_small(
    shape: list[int], whole: int, elements: int, data: st.DataObject
) -> None:
    whole = min(whole, len(shape))
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    other = torch.zeros(*shape[: len(shape) - whole], *[3] * whole, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "ELEMENTS", elements)
        seen: list[int] = []
        for part, partner in blocks.blocks(tensor, other, whole=whole):
            seen += part.flatten().tolist()
            partner += 1
            assert part.shape[part.dim() - whole :] == tensor.shape[len(shape) - whole :], "cut where it must be whole"
            least = math.prod(shape[len(shape) - whole :])
            assert part.numel() <= max(elements, least), "a piece is too large"
    assert sorted(seen) == list(range(tensor.numel()))
    assert bool((other == 1).all())


@pytest.mark.parametrize("dtype", HALVES)
def test_norms_in_pieces(dtype: torch.dtype, piece: int) -> None:
    x, y, weight = torch.randn(3, 5, 33).to(dtype), torch.randn(3, 5, 33).to(dtype), torch.randn(33)
    x[1, 2, 3] = math.nan
    for scale in (None, weight, weight.to(dtype)):
        factors = None if scale is None else array(scale)
        holds(KERNELS["torch.rms_norm.blocked"](x, scale, 1e-6), reference.rms_norm(array(x), factors, 1e-6))
        results = KERNELS["torch.add_rms_norm.blocked"](x, y, scale, 1e-6)
        for got, want in zip(results, reference.fused_add_rms_norm(array(x), array(y), factors, 1e-6), strict=True):
            holds(got, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
def test_gelu_in_pieces(dtype: torch.dtype, piece: int) -> None:
    x = torch.cat((torch.randn(2000) * 3.0, torch.tensor([0.0, -40.0, 1e4, -1e4, math.nan]))).to(dtype)
    for points in (x.reshape(5, 401), x.reshape(401, 5).t()):
        holds(KERNELS["torch.gelu.sigmoid"](points, "tanh"), reference.gelu(array(points), "tanh"))


def test_gelu_of_infinity_is_that_of_the_definition() -> None:
    got = KERNELS["torch.gelu.sigmoid"](torch.tensor([math.inf, -math.inf, 1e30, -1e30]), "tanh").tolist()
    assert got[0] == math.inf and math.isnan(got[1]) and got[2:] == [pytest.approx(1e30), 0.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD", "NHD"])
def test_rope_in_pieces(dtype: torch.dtype, interleaved: bool, layout: str, piece: int) -> None:
    batch, seq, heads = 2, 6, 3
    shape = {"BSHD": (batch, seq, heads), "BHSD": (batch, heads, seq), "NHD": (seq, heads)}[layout]
    for head_dim, rot in ((16, 8), (16, 16), (16, 5), (9, 4)):
        x = torch.randn(*shape, head_dim).to(dtype)
        cos, sin = (torch.randn(12, rot).to(dtype) for _ in range(2))
        ordered = torch.randint(0, 12, (seq,))
        by_sequence = ordered if layout == "NHD" else torch.randint(0, 12, (batch, seq))
        for positions in (None, ordered, by_sequence):
            got = KERNELS["torch.rope.turned"](x, cos, sin, positions, interleaved, layout)
            at = None if positions is None else positions.numpy()
            holds(got, reference.rope(array(x), array(cos), array(sin), interleaved, at, layout))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_of_pairs_that_lie_oddly(interleaved: bool) -> None:
    """Complex numbers begin at every second float: these pairs do not."""
    cos, sin = torch.randn(4, 4), torch.randn(4, 4)
    odd = torch.randn(2 * 4 * 3 * 8 + 1)[1:].reshape(2, 4, 3, 8)
    stepped = torch.randn(2, 4, 3, 16)[..., ::2]
    wide = torch.randn(2, 4, 3, 9)[..., :8]
    for x in (odd, stepped, wide):
        got = KERNELS["torch.rope.turned"](x, cos, sin, None, interleaved, "BSHD")
        holds(got, reference.rope(array(x), array(cos), array(sin), interleaved))


@pytest.mark.parametrize(("seq_q", "seq_k"), [(0, 4), (4, 0), (1, 1), (1, 9), (9, 1), (5, 8), (8, 5)])
def test_alibi_as_windows(seq_q: int, seq_k: int) -> None:
    slopes = torch.tensor([0.5, -0.25, 0.0], dtype=torch.float64)
    got = KERNELS["torch.alibi.unfolded"](slopes, seq_q, seq_k)
    assert got.is_contiguous() and torch.equal(got, KERNELS["torch.alibi"](slopes, seq_q, seq_k))
    assert np.array_equal(array(got), reference.alibi_bias(array(slopes), seq_q, seq_k).values)


# --- single rows, few rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [[0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0], [3.0, 4.0], [1e-30, 1e-30]])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_one_row_at_the_edges(row: list[float], eps: float) -> None:
    x, weight = torch.tensor([row], dtype=torch.float64), torch.tensor([2.0, -1.0], dtype=torch.float64)
    for scale in (None, weight):
        want = reference.rms_norm(array(x), None if scale is None else array(scale), eps)
        holds(KERNELS["torch.rms_norm.one_row"](x, scale, eps), want)
        zeros = torch.zeros_like(x)
        holds(KERNELS["torch.add_rms_norm.one_row"](x, zeros, scale, eps)[0], want)


@pytest.mark.parametrize("window_left", [-1, 0, 3, 14, 15, 16, 39, 40, 100])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_grouped_heads_and_their_window(window_left: int, layout: str) -> None:
    query, key, value = torch.randn(2, 6, 1, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8)
    key[0, 0, -1, 0] = math.nan
    value[1, 1, 0] = math.nan
    if layout == "BSHD":
        query, key, value = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    got = KERNELS["torch.sdpa.flash.grouped"](query, key, value, 0.3, window_left, layout)
    window = (window_left, -1)
    want = reference.attention(array(query), array(key), array(value), scale=0.3, window=window, layout=layout)
    holds(got, want)


# --- feed-forward blocks of half-width floats -------------------------------------------------------------------------


def by_hand(x: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """The block in float64, and the sum of the sizes of the terms of its last product."""
    acts: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "relu": torch.relu,
    }
    act = acts[activation]
    hidden = x.double() @ up.double().T
    hidden = act(hidden) if gate is None else act(x.double() @ gate.double().T) * hidden
    return hidden @ down.double().T, hidden.abs() @ down.double().abs().T


@pytest.mark.parametrize("kernel", ["torch.mlp.blocked", "torch.mlp.two_parts"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("gated", [False, True])
def test_blocks_of_half_width_floats_round_once(kernel: str, activation: str, gated: bool) -> None:
    torch.manual_seed(3)
    # Terms much larger than their sum: rounding anything in between would be seen.
    for rows, hidden, intermediate in ((1, 64, 1100), (5, 33, 513), (20, 7, 512)):
        x, up, gate = (
            torch.randn(size).bfloat16() for size in ((rows, hidden), (intermediate, hidden), (intermediate, hidden))
        )
        down = torch.randn(hidden, intermediate).bfloat16()
        want, size = by_hand(x, up, down, gate if gated else None, activation)
        got = KERNELS[kernel](x, up, down, gate if gated else None, activation).double()
        assert bool(((got - want).abs() <= 2.0**-8 * want.abs() + 1e-5 * size).all())


def test_two_parts_keep_what_is_not_finite() -> None:
    x = torch.ones(4, 2).bfloat16()
    x[1, 0], x[2, 0], x[3, 0] = math.inf, math.nan, 1e37
    up, down = torch.tensor([[1.0, 1.0], [4.0, -1.0]]).bfloat16(), torch.tensor([[1.0, 0.5], [-1.0, 2.0]]).bfloat16()
    got = KERNELS["torch.mlp.two_parts"](x, up, down, None, "relu").double()
    want, _ = by_hand(x, up, down, None, "relu")
    torch.testing.assert_close(got, want, rtol=1e-2, atol=0.0, equal_nan=True)


# --- sampling ---------------------------------------------------------------------------------------------------------

LOGITS = st.sampled_from(("rough", "smooth", "few", "flat", "peaked", "gone"))


def row_of(kind: str, vocab: int, rng: np.random.Generator) -> list[float]:
    """Logits of a kind: with many ties, without, with few values, all equal, one far above, most minus infinity."""
    kinds: dict[str, Callable[[], Any]] = {
        "rough": lambda: rng.integers(-16, 17, vocab) / 8.0,
        "smooth": lambda: rng.normal(0.0, 3.0, vocab),
        "few": lambda: rng.integers(0, 3, vocab) * 1.0,
        "flat": lambda: np.zeros(vocab),
        "peaked": lambda: rng.normal(0.0, 1.0, vocab) - 60.0 * (np.arange(vocab) != vocab // 2),
        "gone": lambda: np.where(rng.random(vocab) < 0.7, -np.inf, rng.normal(0.0, 2.0, vocab)),
    }
    return [float(x) for x in kinds[kind]()]


@examples(300)
@given(
    kinds=st.lists(LOGITS, min_size=1, max_size=3),
    vocab=st.integers(1, 400),
    count=st.integers(1, 40),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_largest_are_those_of_a_stable_sort(
    kinds: list[str], vocab: int, count: int, dtype: torch.dtype, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = torch.tensor([row_of(kind, vocab, rng) for kind in kinds], dtype=torch.float64).to(dtype)
    count = min(count, vocab)
    values, ids = selection.largest(rows, count)
    for row, got_values, got_ids in zip(rows.tolist(), values.tolist(), ids.tolist(), strict=True):
        order = sorted(range(vocab), key=lambda i: -row[i])[:count]
        assert got_ids == order and got_values == [row[i] for i in order]


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_the_last_number_counts_once(count: int) -> None:
    """Groups are of one size, and the vocabulary rarely is a multiple of it."""
    for vocab in range(count, 150):
        _, ids = selection.largest(torch.arange(float(vocab))[None], count)
        assert ids[0].tolist() == list(range(vocab - 1, vocab - 1 - count, -1)), vocab


@pytest.mark.parametrize("vocab", [40, 400, 5000])
def test_a_nan_is_kept_first(vocab: int) -> None:
    for place in (0, vocab // 3, vocab - 1):
        rows = torch.randn(3, vocab)
        rows[1, place] = math.nan
        values, _ = selection.largest(rows, 5)
        assert values.isnan().any(1).tolist() == [False, True, False] and bool(values[1, 0].isnan())
        rules = {"torch.topk": 5, "torch.topk.grouped": 5, "torch.topp": 0.9, "torch.topp.binned": 0.9}
        for name, rule in rules.items():
            drawn = KERNELS[name](rows, torch.full((3,), 0.5), rule, 0)
            assert drawn[1] == -1 and drawn[0] >= 0 and drawn[2] >= 0, name


def drawn_by_sorting(row: list[float], p: float, uniform: float) -> tuple[int, float]:
    """The token of the definition, in sums without rounding, and how clear it is."""
    order = sorted(range(len(row)), key=lambda i: -row[i])
    weights = [math.exp(row[i] - row[order[0]]) for i in order]
    total = math.fsum(weights)
    sums = np.cumsum(np.array(weights, dtype=np.longdouble)) / total
    last = min(int(np.searchsorted(sums, p)), len(sums) - 1)
    margin = float(np.abs(sums - p).min()) if p < 1.0 else 1.0
    target = uniform * float(sums[last])
    margin = min(margin, float(np.abs(sums - target).min()))
    place = min(int(np.searchsorted(sums, target, side="right")), last)
    return order[place], margin


@examples(300)
@given(
    kind=LOGITS,
    vocab=st.integers(1, 300),
    p=st.sampled_from((1.0, 0.99, 0.7, 0.5, 0.05)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
    uniform=st.one_of(st.sampled_from((0.0, 0.999999)), st.floats(0.0, 0.999999)),
    seed=st.integers(0, 2**32 - 1),
)
def test_bins_draw_what_sorting_draws(
    kind: str, vocab: int, p: float, dtype: torch.dtype, uniform: float, seed: int
) -> None:
    row = torch.tensor(row_of(kind, vocab, np.random.default_rng(seed)), dtype=torch.float64).to(dtype)
    if not bool(row.isfinite().any()):
        return
    log_total = torch.logsumexp(row.double(), -1, keepdim=True)
    want, margin = drawn_by_sorting(row.double().tolist(), p, uniform)
    if margin > 1e-11:
        assert selection.drawn_by_bins(row, log_total, p, uniform) == want


def test_bins_give_the_last_token_with_any_probability() -> None:
    """At p of one and the largest number there is below one, sums are reached by rounding alone."""
    row = torch.tensor([0.0, -800.0, 1.0, -math.inf, -3.0])
    log_total = torch.logsumexp(row.double(), -1, keepdim=True)
    assert selection.drawn_by_bins(row, log_total, 1.0, 1.0 - 2.0**-53) == 4


@pytest.mark.parametrize("step", [0.0, 1e-4, 0.02])
def test_a_number_that_is_not_below_one_draws_the_last_token_that_is_kept(step: float) -> None:
    row = -step * torch.arange(300.0, dtype=torch.float64)
    log_total = torch.logsumexp(row, -1, keepdim=True)
    probabilities = torch.exp(row - log_total).cumsum(0)
    for p in (0.3, 0.71, float(probabilities[123])):
        got = selection.drawn_by_bins(row, log_total, p - 1e-9, 1.0)
        assert got == int(torch.searchsorted(probabilities, p - 1e-9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [30, 3000, 50257])
@pytest.mark.parametrize("scale", [0.5, 6.0])
def test_the_same_seed_draws_the_same_by_every_kernel(dtype: torch.dtype, vocab: int, scale: float) -> None:
    torch.manual_seed(vocab)
    logits = (torch.randn(4, 3, vocab) * scale).to(dtype)
    for seed in range(3):
        for k in (1, 7, vocab):
            assert torch.equal(
                KERNELS["torch.topk.grouped"](logits, None, k, seed), KERNELS["torch.topk"](logits, None, k, seed)
            )
        for p in (0.1, 0.9):
            assert torch.equal(
                KERNELS["torch.topp.binned"](logits, None, p, seed), KERNELS["torch.topp"](logits, None, p, seed)
            )


# --- 8-bit integers ---------------------------------------------------------------------------------------------------


def nearest(x: float, scale: float, offset: int) -> int:
    """The unit of the definition, by exact arithmetic."""
    units = round(Fraction(x) / Fraction(scale)) if scale else 0
    return max(-128, min(127, units + offset))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel", "blockwise"])
@pytest.mark.parametrize("zero_point", [False, True])
def test_units_are_rounded_as_if_quotients_were_exact(
    dtype: torch.dtype, granularity: str, zero_point: bool, piece: int
) -> None:
    torch.manual_seed(9)
    x = torch.randn(6, 64)
    x[1] = 0.0
    x[2] = torch.linspace(-12.7, 12.7, 64)
    # Halves of the largest number are a tie, or all but one.
    x[3, :32] = x[3].abs().max() / 2.0
    x = x.to(dtype)
    group = 16 if granularity == "blockwise" else None
    values, scales, zeros = KERNELS["torch.quantize.blocked"](x, None, "int8", granularity, group, zero_point)
    others = KERNELS["torch.quantize"](x, None, "int8", granularity, group, zero_point)
    for got, want in zip((values, scales, zeros), others, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
    for i, j in np.ndindex(6, 64):
        at = {"per_tensor": (0, 0), "per_channel": (i, 0), "blockwise": (i, j // 16)}[granularity]
        assert int(values[i, j]) == nearest(float(x[i, j]), float(scales[at]), int(zeros[at]))


def test_quotients_that_float32_rounds_onto_a_tie() -> None:
    scale = torch.tensor([[1.0 / 3.0]])
    ties = [(k + 0.5) * float(scale) for k in range(-127, 127)]
    x = torch.tensor([[np.nextafter(np.float32(t), np.float32(d)) for t in ties for d in (-1e9, 1e9)] + ties])
    onto = ((x / scale) % 1.0 == 0.5).sum()
    assert onto > len(ties), "the case shows nothing: no quotient is rounded onto a tie"
    values, _, _ = KERNELS["torch.quantize.blocked"](x, scale, "int8", "per_tensor", None, False)
    assert values[0].tolist() == [nearest(v, float(scale), 0) for v in x[0].tolist()]


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel", "blockwise"])
def test_numbers_that_are_none_are_as_with_the_other_kernel(granularity: str) -> None:
    spoiled = torch.randn(4, 32)
    spoiled[0, 3], spoiled[1, 5], spoiled[2, 7] = math.nan, math.inf, -math.inf
    scale = torch.tensor([[0.5], [0.0], [1e-42], [math.nan]]) if granularity == "per_channel" else torch.ones(1, 1)
    for x in (spoiled, torch.zeros(0, 32), torch.zeros(4, 0)):
        for fixed in (None, scale) if x.numel() else (None,):
            for ragged in (16, 24):
                group = ragged if granularity == "blockwise" else None
                call = (x, fixed, "int8", granularity, group, False)
                pairs = zip(KERNELS["torch.quantize.blocked"](*call), KERNELS["torch.quantize"](*call), strict=True)
                for got, want in pairs:
                    assert got.shape == want.shape and torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel", "blockwise"])
@pytest.mark.parametrize("offset", [None, 0, 100, 2**24 - 128, 2**24 + 5, -(2**31)])
def test_back_from_integers(dtype: str, granularity: str, offset: int | None, piece: int) -> None:
    values = torch.randint(-128, 128, (6, 48), dtype=torch.int8)
    shape = {"per_tensor": (1, 1), "per_channel": (6, 1), "blockwise": (6, 3)}[granularity]
    scales = torch.rand(shape) * 1e-3
    zeros = None if offset is None else torch.full(shape, offset, dtype=torch.int32)
    group = 16 if granularity == "blockwise" else None
    got = KERNELS["torch.dequantize.blocked"](values, scales, zeros, dtype, granularity, group)
    wide = scales.double().repeat_interleave(6 // shape[0], 0).repeat_interleave(48 // shape[1], 1)
    want = (values.double() - (offset or 0)) * wide
    assert got.dtype == adapter_cases.DTYPES[dtype]
    if dtype == "float32":
        assert torch.equal(got, want.float())
    else:
        torch.testing.assert_close(got, want.to(got.dtype), rtol=2.0 * torch.finfo(got.dtype).eps, atol=0.0)


# --- the document -----------------------------------------------------------------------------------------------------


def test_while_nothing_is_measured_the_plain_kernel_goes_first() -> None:
    """Alternatives are for measurements to find: none has a higher priority than the kernel it is one to, unless it is
    itself what one writes, or says what its advantage is."""
    for op, listed in adapter_cases.document("torch")["ops"].items():
        by_id = {kernel["kernel_id"]: kernel for kernel in listed}
        for kernel_id, kernel in by_id.items():
            plain = by_id.get(kernel_id.rpartition(".")[0])
            if kernel.get("baseline") or kernel.get("advantage"):
                continue
            if plain is not None and set(plain["dtypes"]) & set(kernel["dtypes"]):
                assert kernel["priority"] < plain["priority"], f"{op}: {kernel_id}"
