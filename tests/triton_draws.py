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
    sampling = import_module("layerzero.backends.torch.sampling")
    logits, uniform = torch.randn(2, 128256), torch.rand(2, dtype=torch.float64)
    got, want = topp(logits, uniform, 0.9, 0), sampling.topp_sorted(logits, uniform, 0.9, 0)
    alone = topp(logits[1:], uniform[1:], 0.9, 0)
    return [] if got.tolist() == want.tolist() and alone[0] == got[1] else [f"{got} and {alone} for {want}"]
