"""Sampling, exactly: given the uniform numbers, a draw has one right answer unless it hangs on the last digits."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import numpy as np
import pytest
import reference
import torch
from conftest import Expected, Family, agrees, everyone, is_refused, run_stored
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import FLOATS, Array, Draw, Stored, array, draws, examples, indices, put_nan, seldom, stored

STORED = (
    stored("sample_topk", "sampling.topk")
    + stored("sample_topp", "sampling.topp")
    + stored("speculative_verify", "sampling.speculative")
)
MARGIN = 1e-9
"""A uniform number nearer than this to a boundary between tokens may be rounded over it."""


def expected(name: str, kwargs: dict[str, Any]) -> tuple[list[Expected], float]:
    """What a call gives, and how clearly."""
    uniform = array(kwargs["uniform"])
    if name == "speculative_verify":
        drafted = (array(kwargs["draft_ids"]), array(kwargs["draft_probs"]), array(kwargs["target_probs"]))
        ids, accepted, margin = reference.speculative_verify(*drafted, uniform)
        return [Expected(ids, torch.int64, exact=True), Expected(accepted, torch.int64, exact=True)], margin
    logits = array(kwargs["logits"])
    if name == "sample_topk":
        ids, margin = reference.sample_topk(logits, kwargs["k"], uniform)
    else:
        ids, margin = reference.sample_topp(logits, kwargs["p"], uniform)
    return [Expected(ids, torch.int64, exact=True)], margin


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_stored(case: Stored, family: Family) -> None:
    if case.expect is None:
        is_refused(case)
        return
    want, _ = expected(case.function, case.kwargs)
    agrees(case, want)
    run_stored(family, case, want)


def _near_a_boundary(logits: Array, rng: np.random.Generator) -> float:
    """A uniform number just off a cumulative probability of the whole row, where a coarse sum goes wrong."""
    finite = logits[np.isfinite(logits)]
    weights = np.sort(np.exp(finite - finite.max()))[::-1] if finite.size else np.ones(1)
    sums = np.cumsum(weights) / weights.sum()
    at = sums[int(rng.integers(len(sums)))] + float(rng.choice([-1.0, 1.0])) * 10.0 ** float(rng.uniform(-8.0, -2.0))
    return float(np.clip(at, 0.0, 1.0 - 2.0**-24))


@st.composite
def logits(draw: st.DrawFn, many: bool = False) -> dict[str, Any]:
    dtype = draw(st.sampled_from(FLOATS))
    vocab = draw(st.sampled_from((4097, 50257) if many else (1, 2, 3, 5, 17, 64, 130)))
    lead = draw(st.lists(st.integers(1, 3), max_size=2))
    if draw(seldom(20)):
        lead = [*lead, 0]
    d: Draw = draw(draws(2))
    bound = draw(st.sampled_from((1.0, 4.0, 4.0, 20.0)))
    rows = d.floats(*lead, vocab, dtype=dtype, bound=bound, coarse=draw(st.booleans()))
    if vocab > 1 and draw(seldom(5)):
        gone = torch.from_numpy(d.rng.random(rows.shape) < 0.4)
        gone[..., 0] = False
        rows = d.lay(rows.masked_fill(gone, float("-inf")))
    if draw(seldom(5)):
        rows = put_nan(rows, d.rng)
    close = draw(st.booleans())
    flat = array(rows).reshape(-1, vocab)
    chosen = [_near_a_boundary(row, d.rng) if close else float(d.rng.random()) for row in flat]
    numbers = torch.tensor(chosen, dtype=draw(st.sampled_from((torch.float32, torch.float64)))).reshape(lead)
    return {"logits": rows, "uniform": d.lay(torch.clamp(numbers, max=1.0 - 2.0**-24))}


@examples(790)
@given(kwargs=logits(), k=st.sampled_from((1, 2, 3, 10, 64, 1000)))
def test_sample_topk(kwargs: dict[str, Any], k: int, family: Family) -> None:
    kwargs = kwargs | {"k": k}
    want, margin = expected("sample_topk", kwargs)
    assume(margin > MARGIN)
    family.check("sample_topk", kwargs, want)


@examples(790)
@given(kwargs=logits(), p=st.sampled_from((1.0, 0.999, 0.9, 0.5, 0.123, 1e-3)))
def test_sample_topp(kwargs: dict[str, Any], p: float, family: Family) -> None:
    kwargs = kwargs | {"p": p}
    want, margin = expected("sample_topp", kwargs)
    assume(margin > MARGIN)
    family.check("sample_topp", kwargs, want)


@examples(30)
@given(kwargs=logits(many=True), k=st.sampled_from((None, 1, 50, 40_000)), p=st.sampled_from((0.1, 0.9, 1.0)))
def test_a_large_vocabulary(kwargs: dict[str, Any], k: int | None, p: float, family: Family) -> None:
    name, kwargs = ("sample_topp", kwargs | {"p": p}) if k is None else ("sample_topk", kwargs | {"k": k})
    want, margin = expected(name, kwargs)
    assume(margin > MARGIN)
    family.check(name, kwargs, want)


def _rows(d: Draw, shape: tuple[int, ...], dtype: torch.dtype, sparse: bool) -> torch.Tensor:
    """Rows of probabilities, as far as the dtype can hold them."""
    weights = d.rng.random(shape) ** 3
    if sparse:
        weights = weights * (d.rng.random(shape) < 0.5)
    weights[..., 0] += 1e-3
    return d.lay(torch.from_numpy(weights / weights.sum(-1, keepdims=True)).to(dtype))


@st.composite
def drafts(draw: st.DrawFn) -> dict[str, Any]:
    dtype = draw(st.sampled_from(FLOATS))
    batch, draft, vocab = draw(st.integers(0, 3)), draw(st.integers(0, 5)), draw(st.sampled_from((1, 2, 5, 33)))
    d: Draw = draw(draws(4))
    draft_probs = _rows(d, (batch, draft, vocab), dtype, draw(st.booleans()))
    target_probs = _rows(d, (batch, draft + 1, vocab), dtype, draw(st.booleans()))
    if draw(seldom(4)):
        # The same model twice: everything is accepted, and no residual is left.
        target_probs = torch.cat([draft_probs, target_probs[:, -1:]], dim=1)
    uniform = d.rng.random((batch, draft + 1))
    if draw(seldom(6)):
        uniform[:, :1] = 0.0
    return {
        "draft_ids": d.ints(d.rng.integers(0, vocab, (batch, draft)), draw(indices)),
        "draft_probs": draft_probs,
        "target_probs": target_probs,
        "uniform": d.lay(torch.from_numpy(uniform).to(draw(st.sampled_from((torch.float32, torch.float64))))),
    }


@examples(450)
@given(kwargs=drafts())
def test_speculative_verify(kwargs: dict[str, Any], family: Family) -> None:
    want, margin = expected("speculative_verify", kwargs)
    assume(margin > MARGIN)
    family.check("speculative_verify", kwargs, want)


# --- seeds and draws --------------------------------------------------------------------------------------------------

LOGITS = torch.tensor([0.1, 1.3, -0.4, 0.9, 0.0, -2.0])
ROWS = 20_000


def draw_many(name: str, **kwargs: Any) -> torch.Tensor:
    """Many draws from the same logits."""
    rule = {"k": 4} if name == "sample_topk" else {"p": 0.95}
    ids: torch.Tensor = getattr(lz, name)(LOGITS.expand(ROWS, 6), **rule, **kwargs)
    return ids


@pytest.mark.parametrize("name", ["sample_topk", "sample_topp"])
def test_seeds(name: str) -> None:
    assert torch.equal(draw_many(name, seed=5), draw_many(name, seed=5))
    assert not torch.equal(draw_many(name, seed=5), draw_many(name, seed=6))
    torch.manual_seed(3)
    first, second = draw_many(name), draw_many(name)
    torch.manual_seed(3)
    assert torch.equal(draw_many(name), first) and not torch.equal(first, second)
    own = torch.Generator().manual_seed(3)
    state = torch.get_rng_state()
    third = draw_many(name, generator=own)
    assert torch.equal(draw_many(name, generator=torch.Generator().manual_seed(3)), third)
    assert torch.equal(torch.get_rng_state(), state), "a generator of one's own leaves the default one alone"


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of the counts against what the probabilities promise."""
    expected = probabilities.double() * counts.sum()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    return float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())


@pytest.mark.parametrize("name", ["sample_topk", "sample_topp"])
def test_draws_follow_the_distribution(name: str) -> None:
    """Below 40 with five degrees of freedom at most: one correct sampler in five million would fail."""
    probabilities = LOGITS.double().softmax(0)
    kept = probabilities.argsort(descending=True)[: 4 if name == "sample_topk" else 5]
    wanted = torch.zeros(6, dtype=torch.float64).index_copy(0, kept, probabilities[kept])
    rule = {"k": 4} if name == "sample_topk" else {"p": 0.95}
    for kernel, ids in everyone(name, logits=LOGITS.expand(ROWS, 6), **rule, seed=11):
        counts = torch.bincount(ids, minlength=6).double()
        assert chi_square(counts, wanted / wanted.sum()) < 40.0, kernel


@pytest.mark.parametrize("name", ["topk", "topp"])
def test_draws_of_few_rows_follow_the_distribution(name: str) -> None:
    """Few weights are drawn from in another way than many."""
    torch.manual_seed(4)
    rule = {"k": 4} if name == "topk" else {"p": 0.95}
    drawn = [lz.run_kernel(f"torch.{name}.literal", LOGITS.expand(80, 6), **rule) for _ in range(250)]
    probabilities = LOGITS.double().softmax(0)
    kept = probabilities.argsort(descending=True)[: 4 if name == "topk" else 5]
    wanted = torch.zeros(6, dtype=torch.float64).index_copy(0, kept, probabilities[kept])
    assert chi_square(torch.bincount(torch.cat(drawn), minlength=6).double(), wanted / wanted.sum()) < 40.0


def test_verified_tokens_are_distributed_as_the_target_says() -> None:
    draft = torch.tensor([0.5, 0.3, 0.1, 0.1])
    target = torch.tensor([0.1, 0.2, 0.3, 0.4])
    ids = torch.multinomial(draft, ROWS, replacement=True, generator=torch.Generator().manual_seed(1))[:, None]
    call = {"draft_ids": ids, "draft_probs": draft.expand(ROWS, 1, 4), "target_probs": target.expand(ROWS, 2, 4)}
    for kernel, (out, accepted) in everyone("speculative_verify", **call, seed=2):
        assert chi_square(torch.bincount(out[:, 0], minlength=4).double(), target) < 40.0, kernel
        # The second token is drawn from the extra row where the first was accepted.
        second = out[accepted == 1, 1]
        assert chi_square(torch.bincount(second, minlength=4).double(), target) < 40.0, kernel
        assert (out[accepted == 0, 1] == -1).all()
