"""Speculative verification against its definition, step by step in plain Python: rows that are no probabilities, numbers at and
beyond the ends of their range, and draws without numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import layerzero as lz
import numpy as np
import pytest
import torch
from processes import SUPPORT, forked

Run = Callable[..., Any]
NAN, INF = math.nan, math.inf
#: A number this near to a boundary may be rounded over it.
MARGIN = 1e-9


def by_definition(ids: Any, drafts: Any, targets: Any, uniform: Any) -> tuple[list[list[int]], list[int], float]:
    """The ids and counts of accepted tokens, one number after the other, and how far the nearest boundary is."""
    results, counts, margin = [], [], 1.0
    for tokens, draft, target, numbers in zip(ids, drafts, targets, uniform, strict=True):
        accepted = 0
        for token, drafted, wanted, number in zip(tokens, draft, target, numbers, strict=False):
            offered = number * drafted[token]
            if offered != 0.0 and not math.isnan(offered - wanted[token]):
                margin = min(margin, abs(offered - wanted[token]))
            if not offered < wanted[token]:
                break
            accepted += 1
        weights = list(target[accepted])
        if accepted < len(tokens):
            rest = [t - d for t, d in zip(target[accepted], draft[accepted], strict=True)]
            rest = [max(one, 0.0) for one in rest]
            weights = rest if any(one != 0.0 for one in rest) else weights
        drawn, total = -1, math.fsum(weights) if all(map(math.isfinite, weights)) else NAN
        if total > 0.0:
            drawn = max(place for place, weight in enumerate(weights) if weight > 0.0)
            if numbers[-1] < 1.0:
                sums = [one / total for one in accumulate(weights)]
                drawn = next((place for place, one in enumerate(sums) if one > max(numbers[-1], 0.0)), drawn)
                margin = min([margin, *(abs(one - numbers[-1]) for one in sums[:-1])])
        results.append([*tokens[:accepted], drawn, *[-1] * (len(tokens) - accepted)])
        counts.append(accepted)
    return results, counts, margin


def _rows(make: np.random.Generator, kind: str, *shape: int) -> np.ndarray[Any, Any]:
    """Rows of probabilities, some of which are none."""
    rows = make.random(shape) ** 4 * (make.random(shape) < 0.6)
    rows[..., 0] += 1e-3
    rows /= rows.sum(-1, keepdims=True)
    for odd in (NAN, INF) if kind == "odd" else ():
        rows[(make.random(shape) < 0.5 / max(shape[-1], 1))] = odd
    if kind == "none":
        rows[make.random(shape[:-1]) < 0.3] = 0.0
    return rows


def differences(run: Run, rounds: int, ends: tuple[float, ...]) -> list[str]:
    """Random calls that give something else than the definition; `ends` are numbers put among those that draw."""
    wrong, seen = [], 0
    for number in range(rounds):
        make = np.random.default_rng(number)
        batch, draft = int(make.integers(1, 4)), int(make.integers(0, 5))
        vocab = 9001 if number % 8 == 0 else int(make.choice([1, 2, 7, 33]))
        kind = ("plain", "plain", "same", "none", "odd")[number % 5]
        dtype = (torch.float32, torch.float16, torch.bfloat16)[number % 3]
        drafts, targets = _rows(make, kind, batch, draft, vocab), _rows(make, kind, batch, draft + 1, vocab)
        if kind == "same":
            targets[:, :draft] = drafts
        tensors = [torch.from_numpy(rows).to(dtype) for rows in (drafts, targets)]
        uniform = torch.from_numpy(make.random((batch, draft + 1)))
        uniform[0, draft] = ends[number % len(ends)] if number % 2 else uniform[0, draft]
        ids = torch.from_numpy(make.integers(0, vocab, (batch, draft)))
        exact = [one.double().tolist() for one in tensors]
        want = by_definition(ids.tolist(), *exact, uniform.tolist())
        if want[2] < MARGIN:
            continue
        seen += 1
        if number % 4 == 0:
            # Rows that do not follow each other.
            tensors = [torch.stack([one, one], 1)[:, 0] for one in tensors]
        got = run(ids.int() if number % 3 == 0 else ids, *tensors, uniform)
        if [one.tolist() for one in got] != [*want[:2]]:
            wrong.append(f"{number} {kind} {dtype}: {[one.tolist() for one in got]} for {want}")
    return wrong if seen > rounds // 2 else [*wrong, f"only {seen} of {rounds} calls were clear"]


WITHIN = (0.0, 1.0 - 2.0**-53, 1e-12)
BEYOND = (*WITHIN, 1.0, 7.0, NAN, INF, -0.5, -INF)


def test_the_kernel_of_the_cpu() -> None:
    def run(*given: torch.Tensor) -> Any:
        return lz.run_kernel("torch.speculative", *given[:3], uniform=given[3])

    assert differences(run, 400, WITHIN) == []


def test_the_kernel_of_devices() -> None:
    """On tensors of the CPU."""
    kernel = import_module("layerzero.backends._shared.torch_device_functions.sampling").speculative
    assert differences(lambda *given: kernel(*given, None), 400, BEYOND) == []


@pytest.mark.parametrize("token", [-1, 5])
def test_an_id_that_is_no_token_is_named(token: int) -> None:
    ids = torch.tensor([[0, 1], [2, token]])
    probs = torch.full((2, 3, 5), 0.2)
    with pytest.raises(
        lz.InvalidCallError, match=rf"draft_ids\[1, 1\] is {token}, expected an index from 0 to below 5"
    ):
        lz.run_kernel("torch.speculative", ids, probs[:, :2], probs)


# --- Triton -----------------------------------------------------------------------------------------------------------


def triton_problems(device: str, rounds: int) -> list[str]:
    """What is wrong with our Triton kernel: with given numbers, with a seed, and with ids that are no tokens."""
    kernel = import_module("layerzero.backends.triton.sampling.verifying").KERNELS["triton.speculative"]

    def run(*given: torch.Tensor) -> Any:
        return [one.cpu() for one in kernel(*(one.to(device) for one in given), None)]

    wrong = differences(run, rounds, BEYOND)
    make = torch.Generator().manual_seed(0)
    drafts, targets = (torch.rand(3, steps, 40, generator=make).softmax(-1) for steps in (2, 3))
    ids = torch.randint(0, 40, (3, 2), generator=make)
    tensors = [one.to(device) for one in (ids, drafts, targets)]
    for seed in (0, 7, -3, 2**62):
        got = kernel(*tensors, None, seed)
        want = lz.run_kernel("lz_cpu.ref.sampling.speculative", ids, drafts, targets, seed=seed)
        if [one.tolist() for one in got] != [one.tolist() for one in want]:
            wrong.append(f"seed {seed}: {got} for {want}")
    ids[1, 0], ids[2, 1] = 40, -1
    out, accepted = (one.cpu() for one in kernel(ids.to(device), *tensors[1:], None, 1))
    if accepted[1] != 0 or accepted[2] > 1 or not ((out >= -1) & (out < 40)).all():
        wrong.append(f"ids that are no tokens give {out.tolist()}, {accepted.tolist()}")
    return wrong


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_interpreter_finds_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = "import interpreting, test_speculative as t\ninterpreting.interpret()\nanswer(t.triton_problems('cpu', 120))"
    assert forked(code, path=[Path(__file__).parent, SUPPORT]) == []


@pytest.mark.gpu
def test_a_device_finds_nothing_wrong() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert triton_problems("cuda", 400) == []
