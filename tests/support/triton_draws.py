"""Draws that are hard to get right, put to the definition in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module

import numpy as np
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

Run = Callable[..., torch.Tensor]


def hard_row(kind: str, vocab: int, make: np.random.Generator) -> torch.Tensor:
    """Logits at which sums or searches go wrong easily."""
    row = make.standard_normal(vocab)
    if kind == "equal":
        row[:] = row[0]
    elif kind == "few":
        row = np.floor(3.0 * make.random(vocab))
    elif kind == "one":
        row[np.arange(vocab) != make.integers(vocab)] = -math.inf
    elif kind == "hidden":
        row[make.random(vocab) < 0.9] = float(make.choice([-math.inf, -1e4, float(np.finfo(np.float32).min)]))
        row[0] = 0.5
    elif kind == "peak":
        row[make.integers(vocab)] += 30.0
    elif kind == "steps":
        row = 0.75 * np.round(row)
    elif kind == "rising":
        row = np.sort(row)
    elif kind == "spread":
        row *= 10.0 ** make.uniform(-3.0, 6.0)
    elif kind == "far":
        row += float(make.choice([-1.0, 1.0])) * 10.0 ** make.uniform(2.0, 30.0)
    elif kind == "unsound":
        row[make.integers(vocab)] = float(make.choice([math.nan, math.inf]))
    elif kind == "zeros":
        row = np.where(make.random(vocab) < 0.5, 0.0, -0.0)
    return torch.from_numpy(row.astype(np.float32))[None]


HARD = ("plain", "equal", "few", "one", "hidden", "peak", "steps", "rising", "spread", "far", "unsound", "zeros")


def hard_draws(topp: Run, topk: Run, count: int) -> list[str]:
    """Draws from such rows that are not those of the definition, where it is clear which they are."""
    wrong: list[str] = []

    @settings(max_examples=count, deadline=None, database=None, derandomize=True)
    @given(
        kind=st.sampled_from(HARD),
        vocab=st.one_of(st.integers(1, 600), st.sampled_from((1024, 1025, 4999))),
        seed=st.integers(0, 2**16),
        dtype=st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float16)),
        number=st.sampled_from((None, None, 0.0, 1e-9, 1.0 - 2.0**-24, 1.0)),
        p=st.sampled_from((None, 1e-12, 0.3, 0.9, 0.9, 0.9999999, 1.0)),
        k=st.sampled_from((1, 2, 50, 1000)),
    )
    def check(
        kind: str, vocab: int, seed: int, dtype: torch.dtype, number: float | None, p: float | None, k: int
    ) -> None:
        make = np.random.default_rng(seed)
        logits = hard_row(kind, vocab, make).to(dtype)
        uniform = torch.tensor([make.random() if number is None else number], dtype=torch.float64)
        row, numbers = logits.double().numpy(), uniform.numpy()
        if p is None:
            got = topk(logits, uniform, k, 0)
            want, margin = reference.sample_topk(row, k, numbers)
        else:
            got = topp(logits, uniform, p, 0)
            want, margin = reference.sample_topp(row, p, numbers)
        if number == 1.0:
            # Nothing exceeds it: the last kept token that has any probability. Which are kept is clear but for p below one.
            order = np.argsort(-row[0], kind="stable")[: k if p is None else vocab]
            want = order[np.exp(row[0, order] - row.max()) > 0.0][-1:]
            margin = 1.0 if p is None or p == 1.0 else 0.0
        if not np.isfinite(row.max()):
            want, margin = np.array([-1]), 1.0
        if margin > 1e-9 and got.tolist() != want.tolist():
            rule = f"k={k}" if p is None else f"p={p}"
            wrong.append(f"{kind} {vocab} {dtype} {rule} {uniform.tolist()}: {got.tolist()} for {want.tolist()}")

    check()
    return wrong


def large_draws(topp: Run) -> list[str]:
    """Draws from a large vocabulary, and that they depend on their row alone."""
    sampling = import_module("layerzero.backends._shared.torch_functions.sampling")
    logits, uniform = torch.randn(2, 128256), torch.rand(2, dtype=torch.float64)
    got, want = topp(logits, uniform, 0.9, 0), sampling.topp_sorted(logits, uniform, 0.9, 0)
    alone = topp(logits[1:], uniform[1:], 0.9, 0)
    return [] if got.tolist() == want.tolist() and alone[0] == got[1] else [f"{got} and {alone} for {want}"]


def wrong_asides() -> list[str]:
    """What is wrong with the sums and the tokens that the last step is given, where a draw would be right all the same but
    slow; whether they depend on their row alone, to the last bit."""
    sampling = import_module("layerzero.backends.triton.sampling.sampling")
    p, parts, sizes = 0.9, 16, sampling.SIZES
    make = np.random.default_rng(5)
    rows = make.standard_normal((5, 5000))
    # Ties: a thread finds several.
    rows[1] = np.round(rows[1] * 20.0) / 20.0
    # All but two weigh nothing.
    rows[2, [7, 9]] = 1e20
    logits, uniform = torch.from_numpy(rows.astype(np.float32)), torch.from_numpy(make.random(5))

    def worked(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        kind = (uniform.dtype, uniform.stride(0), 0)
        plan = sampling._plan(logits.shape, logits.stride(), logits.dtype, logits.device, True, kind, False, False)
        work = torch.zeros(plan.room, dtype=torch.float64)
        plan.survey(logits, work)
        plan.narrow(logits, uniform, work, sampling._bits(p), 0)
        plan.put_aside(logits, uniform, work, sampling._bits(p), 0)
        return work.view(logits.shape[0], -1)

    wrong = []
    together = worked(logits, uniform)
    for number, work in enumerate(together):
        row = logits[number].double()
        alone = worked(logits[number : number + 1], uniform[number : number + 1])[0]
        if not torch.equal(work.view(torch.int64), alone.view(torch.int64)):
            wrong.append(f"row {number} is another one alone")
        codes, sums, counts, floats = work.split([sizes.slots, 3 * parts, parts, len(work) - sizes.slots - 4 * parts])
        begin = parts * (5 + sizes.steps + sizes.thresholds) + sizes.thresholds + 5
        a_lo, a_hi, b_lo, b_hi = floats.view(torch.float32)[begin : begin + 4].tolist()
        weights = torch.exp(row - row.max())
        want = torch.stack([weights.sum(), weights[row > a_hi].sum(), weights[row > b_hi].sum()])
        if not torch.allclose(sums.view(3, parts).sum(1), want, rtol=1e-12, atol=0.0):
            wrong.append(f"row {number}: sums of {sums.view(3, parts).sum(1).tolist()} for {want.tolist()}")
        held = counts.view(torch.int32)[:parts].tolist()
        slots = codes.view(torch.int64).view(-1, parts)
        ids = sorted(int(slots[slot, part]) & 0xFFFFFF for part in range(parts) for slot in range(held[part]))
        among = (((row > a_lo) & (row <= a_hi)) | ((row > b_lo) & (row <= b_hi))) & (weights > 0.0)
        if ids != among.nonzero().flatten().tolist() or not 0 < len(ids) < 500:
            wrong.append(f"row {number}: {len(ids)} tokens are put aside, {int(among.sum())} lie between")
    return wrong
