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
    "layer_norm": "norm.layer",
    "gelu": "activation.gelu",
    "softmax": "activation.softmax",
    "dequantize": "dequantize",
    "embedding": "embedding.lookup",
    "linear": "mlp.linear",
    "attention.standard.prefill": "attention.standard.prefill",
    "attention.gqa.prefill": "attention.gqa.prefill",
    "attention.cross.prefill": "attention.cross.prefill",
    "attention.standard.decode": "attention.standard.decode",
    "attention.gqa.decode": "attention.gqa.decode",
    "attention.cross.decode": "attention.cross.decode",
    "attention.standard.decode.paged": "attention.standard.decode.paged",
    "attention.gqa.decode.paged": "attention.gqa.decode.paged",
    "silu_mul": "activation.silu_mul",
    "add_rms_norm": "norm.fused_add_rms",
    "quantize": "quantize",
    "kv_append": "kv_cache.append",
    "sample_topk": "sampling.topk",
    "sample_topp": "sampling.topp",
}
#: Those that move memory, which every instruction set does alike.
PLAIN = ("kv_append", "embedding")
NAMES = [(name, isa) for name in OPS for isa in ("", ".avx2", ".avx512") if isa == "" or name not in PLAIN]


@pytest.fixture(params=NAMES, ids="".join)
def kernel(restored: None, request: pytest.FixtureRequest) -> Iterator[str]:
    """Each native kernel in turn, as the one that serves; those this CPU cannot run are skipped."""
    name, isa = request.param
    listed = {kernel.kernel_id: kernel.available for kernel in lz.list_kernels()}
    if not listed[f"lz_cpu.{name}{isa}"]:
        pytest.skip("this CPU lacks the instructions")
    lz.force_kernel(OPS[name], f"lz_cpu.{name}{isa}")
    yield name
    lz.unforce_kernel(OPS[name])


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


def _layer_norm(seed: int, dtype: torch.dtype, weight: torch.dtype) -> None:
    # Torch's kernel has the float16 rows, unless it is one.
    x = drawn(seed, 1 if dtype == torch.float16 else 3, 700, dtype=dtype) + 5
    w, b = drawn(seed + 1, 700, dtype=weight), drawn(seed + 2, 700, dtype=weight)
    want = F.layer_norm(x.double(), (700,), w.double(), b.double(), 1e-5)
    near(lz.layer_norm(x, weight=w, bias=b), want)
    near(lz.layer_norm(x, (700,), w, b, 1e-5), want)
    near(lz.layer_norm(x), F.layer_norm(x.double(), (700,)))


def _gelu(seed: int, dtype: torch.dtype, _: torch.dtype) -> None:
    x = drawn(seed, 3, 700, dtype=dtype).mul(4.0)
    for form in ("none", "tanh"):
        near(lz.gelu(x, form), F.gelu(x.double(), approximate=form))


def _softmax(seed: int, _: torch.dtype, __: torch.dtype) -> None:
    # Its dtype is float32.
    x = drawn(seed, 3, (1, 31, 700)[seed % 3]).mul((1.0, 30.0)[seed % 2])
    near(lz.softmax(x), x.double().softmax(-1))


def _embedding(seed: int, dtype: torch.dtype, _: torch.dtype) -> None:
    table, make = drawn(seed, 11, 70, dtype=dtype), torch.Generator().manual_seed(seed)
    ids = torch.randint(11, (3, 4), generator=make, dtype=(torch.int32, torch.int64)[seed % 2])
    ids = ids.t() if seed % 3 == 0 else ids
    assert torch.equal(lz.embedding(ids, table), table[ids.long()])


def _linear(seed: int, dtype: torch.dtype, _: torch.dtype) -> None:
    # Torch's kernel has float32.
    dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    x, w, b = drawn(seed, 1, 70, dtype=dtype), drawn(seed + 1, 9, 70, dtype=dtype), drawn(seed + 2, 9, dtype=dtype)
    near(lz.linear(x, w, b), F.linear(x.double(), w.double(), b.double()))
    near(lz.linear(x[0], w), F.linear(x[0].double(), w.double()))


def _dequantize(seed: int, dtype: torch.dtype, _: torch.dtype) -> None:
    values = drawn(seed, 3, 64).mul(20.0).to((torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)[seed % 3])
    scales, zeros = drawn(seed + 1, 3, 2).contiguous(), torch.tensor([[0, 3], [-7, 0], [1, 2]], dtype=torch.int32)
    name, wide = str(dtype).removeprefix("torch."), values.double().unflatten(-1, (2, 32))
    got = lz.dequantize(values, scales, zeros, dtype=name, granularity="blockwise", group_size=32)
    near(got, ((wide - zeros[..., None]) * scales.double()[..., None]).flatten(-2))
    got = lz.dequantize(values, scales[:, :1].contiguous(), dtype=name, granularity="per_channel")
    near(got, values.double() * scales[:, :1].double())


def _attend(q: Tensor, k: Tensor, v: Tensor, softcap: float, covered: Tensor | None = None) -> Tensor:
    """Attention by its definition, in float64, of tensors in the order batch, heads, tokens, width."""
    group = q.shape[1] // k.shape[1]
    k, v = (one.double().repeat_interleave(group, 1) for one in (k, v))
    scores = q.double() @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if covered is None else scores.masked_fill(~covered, -torch.inf)
    return torch.softmax(scores, -1) @ v


def _decode(seed: int, dtype: torch.dtype, group: int, function: Callable[..., Tensor], **how: Any) -> None:
    layout, tokens = ("BSHD", "BHSD")[seed % 2], 1 + seed % 150
    # Torch's kernel has calls without a softcap in bfloat16, and in float32 unless heads are shared.
    torchs = dtype == torch.bfloat16 or dtype == torch.float32 and group == 1
    softcap = 20.0 if torchs or seed % 3 == 0 else 0.0
    # A part of a longer cache, as decoding sees it.
    k, v = (drawn(seed + i, 2, 3, 160, 40, dtype=dtype)[:, :, :tokens] for i in (1, 2))
    q = drawn(seed, 2, 3 * group, 1, 40, dtype=dtype)
    turned = layout == "BSHD"
    tensors = [one.transpose(1, 2) if turned else one for one in (q, k, v)]

    def check(got: Tensor, wanted: Tensor) -> None:
        near(got.transpose(1, 2) if turned else got, wanted)

    check(function(*tensors, softcap=softcap, layout=layout, **how), _attend(q, k, v, softcap))
    if function is lz.attention:
        left = seed % 70
        near_keys, near_values = k[:, :, -left - 1 :], v[:, :, -left - 1 :]
        given = {"softcap": softcap, "window": (left, 0), "layout": layout}
        check(lz.attention(*tensors, **given), _attend(q, near_keys, near_values, softcap))


def _prefill(seed: int, dtype: torch.dtype, group: int, function: Callable[..., Tensor]) -> None:
    layout, queries = ("BSHD", "BHSD")[seed % 2], 2 + seed % 130
    tokens, cross = queries + seed % 71, function is lz.cross_attention
    k, v = (drawn(seed + i, 2, 3, 210, 40, dtype=dtype)[:, :, :tokens] for i in (1, 2))
    q = drawn(seed, 2, 3 * group, queries, 40, dtype=dtype)
    turned = layout == "BSHD"
    tensors = [one.transpose(1, 2) if turned else one for one in (q, k, v)]
    ahead = torch.arange(tokens)[None] - torch.arange(queries)[:, None] - (tokens - queries)

    def check(covered: Tensor | None, **how: Any) -> None:
        got = function(*tensors, layout=layout, **how)
        near(got.transpose(1, 2) if turned else got, _attend(q, k, v, how.get("softcap", 0.0), covered))

    softcap = 20.0 if seed % 3 == 0 else 0.0
    mask = torch.rand(queries, tokens, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[:, 0] = True
    if cross:
        check(None, softcap=softcap)
        check(mask, attn_mask=mask)
    else:
        left = seed % 70
        check(ahead <= 0, softcap=softcap)
        check((ahead <= 0) & (ahead >= -left), window=(left, 0))
        check((ahead <= 3) & (ahead >= -left), causal=False, window=(left, 3))
        check(mask, causal=False, attn_mask=mask)
        check(mask, causal=False, attn_mask=torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf))


def _paged(seed: int, dtype: torch.dtype, group: int) -> None:
    layout, lens = ("NHD", "HND")[seed % 2], [seed % 60, 1 + seed % 7]
    keys, values = (drawn(seed + i, 9, 8, 3, 40, dtype=dtype) for i in (1, 2))
    tables = torch.tensor([[8, 0, 3, 5, 1, 7, 2, 4], [6, 2, 0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    q, context = drawn(seed, 2, 3 * group, 40, dtype=dtype), torch.tensor(lens, dtype=torch.int32)
    caches = [one.transpose(1, 2) if layout == "HND" else one for one in (keys, values)]
    got = lz.paged_attention(q, *caches, tables, context, layout=layout)
    for row, length in enumerate(lens):
        k, v = (one[tables[row]].flatten(0, 1)[:length].transpose(0, 1)[None] for one in (keys, values))
        wanted = _attend(q[row, :, None][None], k, v, 0.0)[0, :, 0] if length else torch.zeros(3 * group, 40).double()
        near(got[row], wanted)


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


def _sample(seed: int, dtype: torch.dtype, nucleus: bool) -> None:
    vocab = (1, 2, 17, 130, 700, 5000)[seed % 6]
    logits = drawn(seed, 3, vocab, dtype=dtype).mul((0.1, 1.0, 8.0)[seed % 3])
    logits[1, vocab // 2 :] = -torch.inf if vocab > 1 else 0.0
    uniform = torch.rand(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if nucleus:
        p = (1.0, 0.9, 0.31, 1e-4)[seed % 4]
        got = lz.sample_topp(logits, p, uniform=uniform)
    else:
        k = (1, 2, 40, 900, 9000)[seed % 5]
        got = lz.sample_topk(logits, k, uniform=uniform)
    for row, number, token in zip(logits.double(), uniform.tolist(), got.tolist(), strict=True):
        values, ids = row.sort(stable=True, descending=True)
        weights = values.softmax(0) if nucleus else values[:k].softmax(0)
        if nucleus:
            weights = weights[: int((weights.cumsum(0) < p - 1e-12).sum()) + 1]
        sums = weights.cumsum(0) / weights.sum()
        # A number this near to the border of two tokens may be rounded over it.
        if (sums - number).abs().min() > 1e-9:
            assert token == int(ids[int((sums <= number).sum())])


CALLS: dict[str, Callable[[int, torch.dtype, torch.dtype], None]] = {
    "rope": _rope,
    "layer_norm": _layer_norm,
    "gelu": _gelu,
    "softmax": _softmax,
    "embedding": _embedding,
    "linear": _linear,
    "dequantize": _dequantize,
    "attention.standard.prefill": lambda seed, dtype, _: _prefill(seed, dtype, 1, lz.attention),
    "attention.gqa.prefill": lambda seed, dtype, _: _prefill(seed, dtype, 2 + seed % 4, lz.attention),
    "attention.cross.prefill": lambda seed, dtype, _: _prefill(seed, dtype, 1 + seed % 4, lz.cross_attention),
    "sample_topk": lambda seed, dtype, _: _sample(seed, dtype, nucleus=False),
    "sample_topp": lambda seed, dtype, _: _sample(seed, dtype, nucleus=True),
    "attention.standard.decode": lambda seed, dtype, _: _decode(seed, dtype, 1, lz.attention, causal=True),
    "attention.gqa.decode": lambda seed, dtype, _: _decode(seed, dtype, 2 + seed % 8, lz.attention, causal=True),
    "attention.cross.decode": lambda seed, dtype, _: _decode(seed, dtype, 1 + seed % 5, lz.cross_attention),
    "attention.standard.decode.paged": lambda seed, dtype, _: _paged(seed, dtype, 1),
    "attention.gqa.decode.paged": lambda seed, dtype, _: _paged(seed, dtype, 2 + seed % 8),
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
    table, slots = torch.randn(4, 8), torch.tensor([1, 2, 3])
    q, k, one = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 4, 16)
    pages, lens = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32)
    wide, bytes_ = torch.randn(2, 4, 9, 16), torch.ones(2, 16, dtype=torch.int8)
    weight, scales, half = torch.randn(16), torch.ones(2, 1), torch.randn(4, 16).bfloat16()
    calls: dict[str, Callable[[], Any]] = {
        "rope": lambda: lz.rope(x, table[:3], table[:3]),
        "layer_norm": lambda: (lz.layer_norm(x, weight=weight, bias=weight), lz.layer_norm(x, (16,), weight, weight)),
        "gelu": lambda: lz.gelu(x, "tanh"),
        "softmax": lambda: lz.softmax(x),
        "embedding": lambda: lz.embedding(slots, table),
        "linear": lambda: lz.linear(half[0], half),
        "dequantize": lambda: lz.dequantize(bytes_, scales, granularity="per_channel"),
        "attention.standard.prefill": lambda: lz.attention(wide, wide, wide, layout="BHSD"),
        "attention.gqa.prefill": lambda: lz.attention(wide, k, k, layout="BHSD"),
        "attention.cross.prefill": lambda: lz.cross_attention(wide, k, k, layout="BHSD"),
        "sample_topk": lambda: (lz.sample_topk(table, 3, uniform=table[:, 0] * 0.0), lz.sample_topk(table, 3, seed=4)),
        "sample_topp": lambda: (
            lz.sample_topp(table, 0.5, uniform=table[:, 0] * 0.0),
            lz.sample_topp(table, 0.5, seed=4),
        ),
        "attention.standard.decode": lambda: lz.attention(q, wide, wide, softcap=9.0, layout="BHSD"),
        "attention.gqa.decode": lambda: lz.attention(q, k, k, layout="BHSD"),
        "attention.cross.decode": lambda: lz.cross_attention(q, k, k, layout="BHSD"),
        "attention.standard.decode.paged": lambda: lz.paged_attention(one[:, :2], cache, cache, pages, lens),
        "attention.gqa.decode.paged": lambda: lz.paged_attention(one, cache, cache, pages, lens),
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


@pytest.mark.parametrize("name", ["sample_topk", "sample_topp"])
def test_draws_are_those_of_torchs_generator_or_of_the_seed(name: str, restored: None) -> None:
    op, rule = f"sampling.{name.removeprefix('sample_')}", {"k": 40} if name == "sample_topk" else {"p": 0.9}
    lz.force_kernel(op, f"lz_cpu.{name}")
    logits = drawn(1, 50, 300)

    def draw(**how: Any) -> Tensor:
        ids: Tensor = getattr(lz, name)(logits, **rule, **how)
        return ids

    torch.manual_seed(3)
    first = [draw() for _ in range(5)]
    assert not any(torch.equal(first[0], other) for other in first[1:])
    torch.manual_seed(3)
    assert all(torch.equal(draw(), before) for before in first)
    # A seed is that of its call, and draws nothing from the generator.
    state = torch.get_rng_state()
    for _ in range(3):
        assert torch.equal(draw(seed=5), draw(seed=5))
        assert not torch.equal(draw(seed=5), draw(seed=6))
    assert torch.equal(torch.get_rng_state(), state)
    for _ in range(3):
        with pytest.raises(lz.LayerZeroError, match="seed"):
            draw(seed="five")
    lz.unforce_kernel(op)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("name", "rule"), [("sample_topk", {"k": 30}), ("sample_topp", {"p": 0.8})])
def test_draws_of_many_tokens_follow_the_distribution(
    name: str, rule: dict[str, Any], temperature: float, restored: None
) -> None:
    """By chi-square, below mean + 6 standard deviations: one right sampler in a million fails."""
    op = f"sampling.{name.removeprefix('sample_')}"
    lz.force_kernel(op, f"lz_cpu.{name}")
    logits = drawn(5, 1, 1000)[0] * 2.0 / temperature
    ids = getattr(lz, name)(logits.expand(30_000, 1000), **rule, seed=1)
    values, order = logits.double().sort(stable=True, descending=True)
    weights = values.softmax(0)
    kept = rule["k"] if name == "sample_topk" else int((weights.cumsum(0) < rule["p"]).sum()) + 1
    expected = torch.zeros(1000, dtype=torch.float64)
    expected[order[:kept]] = weights[:kept] / weights[:kept].sum() * len(ids)
    counts = torch.bincount(ids, minlength=1000).double()
    assert counts[expected == 0].sum() == 0
    chosen = expected > 0
    square = float(((counts - expected)[chosen] ** 2 / expected[chosen]).sum())
    assert square < (kept - 1) + 6.0 * (2.0 * kept) ** 0.5
    lz.unforce_kernel(op)
