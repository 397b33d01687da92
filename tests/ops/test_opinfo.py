"""Torch's own sample inputs (OpInfo), through LayerZero, against torch's own functions in float64.

Every sample either runs or is listed with the reason why LayerZero's contract has no such call; both are counted, so
that the list cannot grow unnoticed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import layerzero
import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from conftest import Expected, difference
from strategies import array, exact
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput

lz: Any = layerzero
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PREFIX = "nn.functional."
DROPOUT = "dropout draws random numbers of its own"
NEGATIVE_EPS = "eps is negative, which the contract refuses"
MAX_NORM = "max_norm rewrites rows of the table"


@dataclass(frozen=True)
class Pair:
    """The same call for both: LayerZero's on the sample's tensors, torch's on their float64 values."""

    ours: Callable[[], Any]
    theirs: Callable[[], torch.Tensor]
    growth: Any = 0.0


def wide(value: Any) -> Any:
    """A float tensor in float64; anything else as it is."""
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def attention(sample: SampleInput) -> Pair | str:
    """Batches and heads are broadcast by hand, and torch's causal mask, aligned top-left, is passed as a mask."""
    q, (k, v), options = sample.input, sample.args, sample.kwargs
    if options.get("dropout_p"):
        return DROPOUT
    mask, scale, gqa = options.get("attn_mask"), options.get("scale"), options.get("enable_gqa", False)
    causal, top_left = options.get("is_causal", False), None
    if causal and q.shape[-2] != k.shape[-2]:
        top_left = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    rank = max(q.dim(), k.dim())
    lead = q.shape[:-2] if gqa else np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    shaped = [x if gqa else x.expand(*lead, *x.shape[-2:]) for x in (q, k, v)]
    ours = [x.unsqueeze(1) if rank == 3 else x for x in shaped]

    given = mask if top_left is None else top_left

    def run() -> torch.Tensor:
        out: torch.Tensor = lz.attention(*ours, causal and top_left is None, scale, attn_mask=given, layout="BHSD")
        return out.squeeze(1) if rank == 3 else out

    def sdpa() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            wide(q), wide(k), wide(v), attn_mask=wide(mask), is_causal=causal, scale=scale, enable_gqa=gqa
        )

    # The samples' scores are in the hundreds, and a float32 score is as far off as its own magnitude's roundoff.
    growth = reference.attention(
        *(array(x) for x in ours),
        causal=causal and top_left is None,
        scale=scale,
        attn_mask=exact(given),
        layout="BHSD",
    ).growth
    return Pair(run, sdpa, np.squeeze(growth, 1) if rank == 3 else growth)


def _flat(sample: SampleInput, shape: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Norms over several trailing dimensions are norms over one that holds them all."""
    width = math.prod(shape)
    x = sample.input.reshape(*sample.input.shape[: sample.input.dim() - len(shape)], width)
    return x, [None if w is None else w.reshape(width) for w in sample.args[1:]]


def rms_norm(sample: SampleInput) -> Pair | str:
    """Torch takes the dtype's epsilon when none is given; ours is a constant, so it is always passed."""
    shape, eps = sample.args[0], sample.kwargs.get("eps", torch.finfo(sample.input.dtype).eps)
    if eps < 0.0:
        return NEGATIVE_EPS
    x, weights = _flat(sample, shape)
    weight = weights[0] if weights else None
    theirs = wide(sample.args[1]) if weights else None
    return Pair(
        lambda: lz.rms_norm(x, weight, eps).reshape(sample.input.shape),
        lambda: F.rms_norm(wide(sample.input), shape, theirs, eps),
    )


def layer_norm(sample: SampleInput) -> Pair | str:
    """Likewise."""
    shape, eps = sample.args[0], sample.kwargs.get("eps", 1e-5)
    if eps < 0.0:
        return NEGATIVE_EPS
    x, weights = _flat(sample, shape)
    theirs = [wide(w) for w in sample.args[1:]] or [None, None]
    return Pair(
        lambda: lz.layer_norm(x, (x.shape[-1],), *weights, eps=eps).reshape(sample.input.shape),
        lambda: F.layer_norm(wide(sample.input), shape, theirs[0], theirs[1], eps),
    )


def linear(sample: SampleInput) -> Pair | str:
    """The terms of a sum may cancel: its float32 error is relative to them, not to the result."""
    arrays = [array(x) for x in (sample.input, *sample.args)]
    return Pair(
        lambda: lz.linear(sample.input, *sample.args),
        lambda: F.linear(wide(sample.input), *(wide(a) for a in sample.args)),
        reference.linear(*arrays).growth,
    )


def embedding(sample: SampleInput) -> Pair | str:
    """`padding_idx`, `scale_grad_by_freq` and `sparse` shape gradients only; the looked-up rows are the same."""
    if "max_norm" in sample.kwargs:
        return MAX_NORM
    weight, indices = sample.input, sample.args[0]
    return Pair(lambda: lz.embedding(indices, weight), lambda: F.embedding(indices, wide(weight), **sample.kwargs))


def gelu(sample: SampleInput) -> Pair | str:
    """The same two forms."""
    return Pair(lambda: lz.gelu(sample.input, **sample.kwargs), lambda: F.gelu(wide(sample.input), **sample.kwargs))


# How many samples of each dtype run, and how many are left out for which reason.
CASES: dict[str, tuple[Callable[[SampleInput], Pair | str], int, dict[str, int]]] = {
    "scaled_dot_product_attention": (attention, 13, {DROPOUT: 12}),
    "rms_norm": (rms_norm, 5, {NEGATIVE_EPS: 1}),
    "layer_norm": (layer_norm, 5, {NEGATIVE_EPS: 1}),
    "linear": (linear, 18, {}),
    "embedding": (embedding, 7, {MAX_NORM: 3}),
    "gelu": (gelu, 8, {}),
}


def samples(name: str, dtype: torch.dtype) -> Iterator[SampleInput]:
    """Torch's sample inputs for one of its functions."""
    found: list[Any] = [op for op in op_db if op.name == PREFIX + name]
    assert len(found) == 1
    yield from found[0].sample_inputs("cpu", dtype, requires_grad=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_samples(name: str, dtype: torch.dtype) -> None:
    express, runs, left_out = CASES[name]
    torch.manual_seed(0)
    ran, reasons = 0, Counter[str]()
    for number, sample in enumerate(samples(name, dtype)):
        pair = express(sample)
        if isinstance(pair, str):
            reasons[pair] += 1
            continue
        want = Expected(array(pair.theirs()), dtype, pair.growth)
        wrong = difference(pair.ours(), want)
        assert wrong is None, f"sample {number} of {name}: {wrong}\n{sample}"
        ran += 1
    assert (ran, dict(reasons)) == (runs, left_out)


def test_torch_causal_with_unequal_lengths_is_another_function() -> None:
    """Torch aligns top-left, LayerZero bottom-right: the one difference behind the samples passed with a mask."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 6, 8)
    ours = lz.attention(q, k, k, True, layout="BHSD")
    assert not torch.allclose(ours, F.scaled_dot_product_attention(q, k, k, is_causal=True), atol=1e-3)
    mask = torch.ones(3, 6, dtype=torch.bool).tril(3)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, k, attn_mask=mask), rtol=1e-5, atol=1e-5)


def test_the_references_agree_with_torch_where_torch_has_the_same_function() -> None:
    """In float64, so that a mistake shared by reference and kernels would show here."""
    rng = np.random.default_rng(7)
    t = torch.from_numpy
    x, w, b, up = (rng.normal(size=s) for s in ((5, 8), (8,), (8,), (5, 8)))
    weight, bias = rng.normal(size=(6, 8)), rng.normal(size=6)
    q, k, v = (rng.normal(size=s) for s in ((2, 6, 4, 8), (2, 2, 4, 8), (2, 2, 4, 5)))
    mask, floating = rng.random((2, 1, 4, 4)) < 0.8, rng.normal(size=(4, 4))
    mask[..., 0] = True

    def sdpa(**options: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(t(q), t(k), t(v), enable_gqa=True, **options)

    pairs = [
        (reference.rms_norm(x, w, 0.1), F.rms_norm(t(x), (8,), t(w), 0.1)),
        (reference.layer_norm(x, w, b, 0.1), F.layer_norm(t(x), (8,), t(w), t(b), 0.1)),
        (reference.gelu(x), F.gelu(t(x))),
        (reference.gelu(x, "tanh"), F.gelu(t(x), approximate="tanh")),
        (reference.silu_mul(x, up), F.silu(t(x)) * t(up)),
        (reference.linear(x, weight, bias), F.linear(t(x), t(weight), t(bias))),
        (reference.attention(q, k, v, causal=True, layout="BHSD"), sdpa(is_causal=True)),
        (reference.attention(q, k, v, causal=False, scale=0.3, layout="BHSD"), sdpa(scale=0.3)),
        (reference.attention(q, k, v, causal=False, attn_mask=mask, layout="BHSD"), sdpa(attn_mask=t(mask))),
        (reference.attention(q, k, v, causal=False, attn_mask=floating, layout="BHSD"), sdpa(attn_mask=t(floating))),
    ]
    for answer, theirs in pairs:
        np.testing.assert_allclose(answer.values, theirs.numpy(), rtol=1e-12, atol=1e-12)
