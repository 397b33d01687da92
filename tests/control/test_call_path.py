"""The call path from Python: sequences of failures, against the same model that calls on host tensors are held to.

`testdata/call_path.json` has sequences that `crates/layerzero/tests/dispatch/call_path.rs` replays too; others are drawn.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "testdata"))

from cases import call_path

FULL = os.environ.get("LZ_TEST_SCALE", "quick") == "full"

#: What the kernels do in the call being made, and which have run.
behaviour: dict[str, str] = {}
ran: list[str] = []


def scripted(kernel: str, right: Callable[..., Any], updated: Callable[..., Iterator[Tensor]]) -> Callable[..., Any]:
    """Has a kernel do what the script says; one that fails has spoiled half of what it was to write."""

    def run(*args: Any) -> Any:
        ran.append(kernel)
        match behaviour[kernel]:
            case "serves":
                return right(*args)
            case "refuses the data":
                raise lz.InvalidCallError("the data is wrong", code="BAD_DATA", hint="")
        for rows in updated(*args):
            rows.fill_(77.0)
        raise RuntimeError("out of memory" if behaviour[kernel] == "runs out of memory" else "it broke")

    return run


def no_rows(*_: Any) -> Iterator[Tensor]:
    return iter(())


def rms(input: Tensor) -> Tensor:
    x = input.double()
    return (x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).float()


def append(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    for new, cache in ((key, key_cache), (value, value_cache)):
        for token, slot in enumerate(slot_mapping.tolist()):
            cache[slot // cache.shape[1], slot % cache.shape[1]] = new[token]


def appended(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> Iterator[Tensor]:
    slot = int(slot_mapping[0])
    yield key_cache[slot // key_cache.shape[1], slot % key_cache.shape[1]]


def compact(key_cache: Tensor, value_cache: Tensor, moves: Tensor) -> None:
    for cache in (key_cache, value_cache):
        before = cache.clone()
        for source, target in moves.tolist():
            cache[target] = before[source]


def compacted(key_cache: Tensor, value_cache: Tensor, moves: Tensor) -> Iterator[Tensor]:
    yield key_cache[int(moves[0, 1])]
    yield value_cache[int(moves[-1, 1])]


def registered(op: str, kernel: str, priority: int, workspace: int) -> Any:
    """Registers a scripted kernel."""
    what = {
        "norm.rms": (rms, no_rows),
        "kv_cache.append": (append, appended),
        "kv_cache.compact": (compact, compacted),
    }
    run = scripted(kernel, *what[op])
    functions: dict[str, Callable[..., Any]] = {
        "norm.rms": lambda input, eps: run(input),
        "kv_cache.append": lambda key, value, key_cache, value_cache, slot_mapping: run(
            key, value, key_cache, value_cache, slot_mapping
        ),
        "kv_cache.compact": lambda key_cache, value_cache, moves: run(key_cache, value_cache, moves),
    }
    layouts = None if op == "norm.rms" else ["NHD"]
    return lz.register_kernel(
        operation=op,
        kernel_id=f"{kernel}.{op}",
        platform="cpu",
        supported_dtypes=["float32"],
        layouts=layouts,
        priority=priority,
        trusted=True,
        workspace_bytes=str(workspace),
    )(functions[op])


def call(op: str) -> tuple[Callable[[], Any], Callable[[Any], bool]]:
    """A call, and whether its answer, or what it updated, is right."""
    draw = torch.Generator().manual_seed(3)
    if op == "norm.rms":
        x = torch.randn(3, 8, generator=draw)
        return lambda: lz.rms_norm(x), lambda y: torch.allclose(y, rms(x), atol=1e-5)
    caches = [torch.randn(4, 2, 2, 3, generator=draw) for _ in range(2)]
    wanted = [cache.clone() for cache in caches]
    if op == "kv_cache.append":
        new = [torch.randn(3, 2, 3, generator=draw) for _ in range(2)]
        slots = torch.tensor([5, 0, 2])
        append(*new, *wanted, slots)
        arguments = (*new, *caches, slots)
        function: Callable[..., Any] = lz.kv_append
    else:
        moves = torch.tensor([[3, 0], [0, 1], [2, 2]])
        compact(*wanted, moves)
        arguments = (*caches, moves)
        function = lz.kv_compact
    same = lambda _: all(torch.equal(a, b) for a, b in zip(caches, wanted, strict=True))
    return lambda: function(*arguments), same


def replay(sequence: dict[str, Any]) -> None:
    """Makes the calls of a sequence, and holds each to what the model says."""
    op = sequence["op"]
    kernels = list(sequence["workspaces"])
    _native = lz._native
    _native.reset()
    lz.configure(
        fallback_enabled=sequence["fallback"],
        degradation={"enabled": False},
        breaker={"failure_threshold": call_path.THRESHOLD},
        # The kernels of the sequence and the reference, nobody else.
        rules=[{"deny": k.kernel_id} for k in lz.list_kernels(sequence["op"]) if not k.reference],
    )
    lz.forget_failures()
    for number, kernel in enumerate(kernels):
        registered(op, kernel, 90 - 10 * number, sequence["workspaces"][kernel])
    try:
        for made in sequence["calls"]:
            behaviour.clear()
            behaviour.update(made["kernels"])
            ran.clear()
            expected = made["expected"]
            run, is_right = call(op)
            end = "served"
            try:
                answer = run()
            except lz.InvalidCallError:
                end = "refused"
            except lz.KernelExecutionError:
                end = "unserved"
            assert (end, ran) == (expected["end"], [k for k in expected["ran"] if k != call_path.REFERENCE]), made
            assert end != "served" or is_right(answer), made
        states = {b["kernel"]: b["state"] for b in lz.health().breakers if b["op"] == op}
        assert sorted(k for k in kernels if states.get(f"{k}.{op}", "closed") != "closed") == sequence["open"]
    finally:
        for kernel in kernels:
            lz.unregister_kernel(f"{kernel}.{op}")


@pytest.fixture(scope="module")
def sequences() -> list[dict[str, Any]]:
    text = (ROOT / "testdata" / "call_path.json").read_text(encoding="utf-8")
    return json.loads(text)["sequences"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("restored")
def test_the_same_sequences_as_host_calls_replay(sequences: list[dict[str, Any]]) -> None:
    for sequence in sequences if FULL else sequences[::3]:
        replay(sequence)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("restored")
@settings(max_examples=200 if FULL else 12, deadline=None)
@given(st.integers(1000, 10**9))
def test_drawn_sequences_follow_the_model(seed: int) -> None:
    replay(call_path.sequence(seed))
