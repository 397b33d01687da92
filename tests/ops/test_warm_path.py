"""Calls that were seen before: nothing is allocated, nothing grows, and no decision serves a call it is not for."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero import _native
from torch_cases import EVERY_FUNCTION, Case

pytestmark = pytest.mark.usefixtures("nothing_measured")
X = torch.linspace(-1.0, 1.0, 64).reshape(8, 8)
REPEATS = 10_000

counted = pytest.mark.skipif(_native.allocations() is None, reason="a release build does not count allocations")

# Functions whose result is made in Python, or whose kernel may have to be given a seed: they take the longer way.
NOT_STRAIGHT = {"kv_compact"}


def normed(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """What rms_norm gives, in float64."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()


KINDS: dict[str, dict[str, Any]] = {
    # The more it can, the lower it stands, so that the choice shows what the call was taken for.
    "narrow": {"supported_dtypes": ["float32"], "priority": 99, "dims": {"rows": {"max": 4}}},
    "random": {"supported_dtypes": ["float32"], "priority": 98},
    "exact": {"supported_dtypes": ["float32"], "priority": 97, "deterministic": True},
    "wide": {"supported_dtypes": ["float64", "bfloat16"], "priority": 96, "deterministic": True},
    "trained": {
        "supported_dtypes": ["float32", "float64"],
        "priority": 95,
        "autograd": True,
        "deterministic": True,
    },
    "gaps": {"supported_dtypes": ["float16"], "priority": 94, "layouts": ["strided"], "deterministic": True},
}


class Recorded:
    """Kernels of rms_norm with different powers, each of which notes that it ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        for name, capabilities in KINDS.items():
            given = {"operation": "norm.rms", "kernel_id": f"recorded.{name}", "platform": "cpu", **capabilities}
            lz.register_kernel(**given)(self._kernel(name))

    def _kernel(self, name: str) -> Callable[..., torch.Tensor]:
        def kernel(input: torch.Tensor, eps: float) -> torch.Tensor:
            self.ran.append(f"recorded.{name}")
            return input * torch.rsqrt(input.square().mean(-1, keepdim=True) + eps)

        return kernel

    def chosen(self, x: torch.Tensor, **kwargs: Any) -> str:
        """The kernel that really runs, which must be the one `which` names, now and when the call is repeated."""
        told = lz.which("rms_norm", x, **kwargs).kernel_id
        for _ in range(3):
            self.ran.clear()
            lz.rms_norm(x, **kwargs)
            assert self.ran == ([told] if told.startswith("recorded.") else []), told
        return str(told).removeprefix("recorded.")

    def clear(self) -> None:
        """Takes them away."""
        for name in KINDS:
            lz.unregister_kernel(f"recorded.{name}")


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    """The kernels of one test."""
    made = Recorded()
    yield made
    made.clear()


# --- what it costs ----------------------------------------------------------------------------------------------------


@counted
@pytest.mark.parametrize("case", EVERY_FUNCTION, ids=[case.function for case in EVERY_FUNCTION])
def test_a_call_seen_before_allocates_nothing(case: Case) -> None:
    args, kwargs = case.make(5)
    function = getattr(lz, case.function)
    repeats = 100 if case.function in ("paged_attention", "mla_attention", "sparse_attention") else 1000
    for _ in range(3):
        function(*args, **kwargs)
    made = repeats
    for _ in range(3):
        before = _native.allocations()
        for _ in range(repeats):
            function(*args, **kwargs)
        # Threads in the background allocate now and then, calls would every time.
        made = min(made, _native.allocations() - before)
    if case.function in NOT_STRAIGHT:
        assert made > 0, "it is on the straight path now: take it out of the list"
    else:
        assert made == 0


@counted
def test_ten_thousand_calls_allocate_nothing() -> None:
    q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 2, 8)
    for _ in range(3):
        lz.attention(q, k, k, causal=True, scale=0.5)
    before = _native.allocations()
    for _ in range(REPEATS):
        lz.attention(q, k, k, causal=True, scale=0.5)
    assert _native.allocations() == before


@counted
def test_allocations_are_counted_at_all() -> None:
    before = _native.allocations()
    lz.rms_norm(torch.ones(3, 1733))
    assert _native.allocations() > before


def test_the_memory_of_calls_is_bounded() -> None:
    most = 0
    for n in range(1, 20_001):
        lz.rms_norm(X[:1, :1].expand(n, 1))
        if n % 1000 == 0:
            most = max(most, _native.status()["calls_remembered"])
    assert 500 < most <= 2048
    assert _native.status()["cache_entries"] < 20_000
    torch.testing.assert_close(lz.rms_norm(X).double(), normed(X), rtol=1e-6, atol=1e-6)


# --- nothing is mistaken for something else ---------------------------------------------------------------------------


def test_every_difference_that_decides_is_seen(recorded: Recorded) -> None:
    """Each step changes one thing about the same memory; then all of them again, warm, in another order."""
    other = torch.nn.Parameter(X.clone())

    def deterministic(call: Callable[[], str]) -> str:
        torch._C._set_deterministic_algorithms(True, warn_only=False)
        try:
            return call()
        finally:
            torch._C._set_deterministic_algorithms(False, warn_only=False)

    def without_grad(call: Callable[[], str]) -> str:
        with torch.no_grad():
            return call()

    def inferred(call: Callable[[], str]) -> str:
        with torch.inference_mode():
            return call()

    chosen = recorded.chosen
    steps: list[tuple[str, Callable[[], str]]] = [
        ("random", lambda: chosen(X)),
        ("narrow", lambda: chosen(X[:4])),
        ("random", lambda: chosen(X[:5])),
        ("wide", lambda: chosen(X.double())),
        ("wide", lambda: chosen(X.bfloat16())),
        ("narrow", lambda: chosen(X.view(4, 16))),
        ("trained", lambda: chosen(other)),
        ("random", lambda: without_grad(lambda: chosen(other))),
        ("random", lambda: inferred(lambda: chosen(other))),
        ("random", lambda: chosen(other.detach())),
        ("trained", lambda: chosen(other.double())),
        ("exact", lambda: deterministic(lambda: chosen(X))),
        ("trained", lambda: deterministic(lambda: chosen(other))),
        ("exact", lambda: deterministic(lambda: without_grad(lambda: chosen(other)))),
        ("random", lambda: chosen(X.t())),
        ("gaps", lambda: chosen(X.half())),
        ("gaps", lambda: chosen(X.half()[:, ::2])),
        ("random", lambda: chosen(X, eps=0.5)),
        ("torch.rms_norm", lambda: chosen(X, weight=X[0])),
    ]
    for order in (steps, steps[::-1], steps[1::2] + steps[::2]):
        for wanted, step in order:
            assert step() == wanted


def test_results_follow_every_argument() -> None:
    """The same memory and shapes, another value, stride or flag each time, in turns."""
    q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 4, 8)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "causal": lambda: lz.attention(q, k, k, layout="BSHD"),
        "full": lambda: lz.attention(q, k, k, False, layout="BSHD"),
        "scale": lambda: lz.attention(q, k, k, scale=0.1, layout="BSHD"),
        "scale-int": lambda: lz.attention(q, k, k, scale=1, layout="BSHD"),
        "heads-first": lambda: lz.attention(q, k, k, layout="BHSD"),
        "window": lambda: lz.attention(q, k, k, window=1, layout="BSHD"),
        "window-both": lambda: lz.attention(q, k, k, False, window=(2, 0), layout="BSHD"),
        "window-wider": lambda: lz.attention(q, k, k, False, window=(2, 1), layout="BSHD"),
        "softcap": lambda: lz.attention(q, k, k, softcap=0.5, layout="BSHD"),
        "transposed": lambda: lz.attention(q, k.transpose(1, 2), k, layout="BSHD"),
        "mask": lambda: lz.attention(q, k, k, False, attn_mask=torch.eye(4, dtype=torch.bool), layout="BSHD"),
        "mask-float": lambda: lz.attention(q, k, k, False, attn_mask=torch.eye(4), layout="BSHD"),
    }
    first = {name: call() for name, call in calls.items()}
    names = list(calls)
    for i, a in enumerate(names):
        assert not any(torch.equal(first[a], first[b]) for b in names[:i]), a
    for name in names * 3 + names[::-1]:
        assert torch.equal(calls[name](), first[name]), name


def test_whole_numbers_are_taken_as_what_they_are() -> None:
    """True, 1 and 1.0 are equal to Python and not the same to a call."""
    lz.rms_norm(X, eps=1.0)
    assert torch.equal(lz.rms_norm(X, eps=1), lz.rms_norm(X, eps=1.0))
    for _ in range(2):
        with pytest.raises(lz.ArgumentTypeError, match="eps"):
            lz.rms_norm(X, eps=True)
    lz.attention(X[None, :, None], X[None, :, None], X[None, :, None], True)
    for _ in range(2):
        with pytest.raises(lz.ArgumentTypeError, match="causal"):
            lz.attention(X[None, :, None], X[None, :, None], X[None, :, None], 1)


# --- registration -----------------------------------------------------------------------------------------------------


def test_a_registration_takes_effect_on_the_very_next_call() -> None:
    seen: list[int] = []

    def kernel(i: int) -> Callable[..., torch.Tensor]:
        def run(input: torch.Tensor, eps: float) -> torch.Tensor:
            seen.append(i)
            return input + i

        return run

    plain = lz.rms_norm(X)
    for i in range(1, 20):
        assert torch.equal(lz.rms_norm(X), plain)
        lz.register_kernel(
            operation="norm.rms", kernel_id=f"next.k{i}", platform="cpu", supported_dtypes=["float32"], priority=99
        )(kernel(i))
        assert torch.equal(lz.rms_norm(X), X + i) and torch.equal(lz.rms_norm(X), X + i)
        lz.unregister_kernel(f"next.k{i}")
    assert torch.equal(lz.rms_norm(X), plain)
    assert seen == [i for i in range(1, 20) for _ in range(2)]


def test_calls_go_on_while_another_thread_registers() -> None:
    """Each call is served whole, by a kernel that was registered when it began or became so."""
    stop, wrong, calls = threading.Event(), [], [0, 0, 0]
    wanted = {8: normed(X).float(), 4: normed(X[:4]).float(), 1: normed(X[:1]).float()}

    def right(input: torch.Tensor, eps: float) -> torch.Tensor:
        return normed(input, eps).float()

    def call(which: int, rows: int) -> None:
        try:
            while not stop.is_set():
                if not torch.allclose(lz.rms_norm(X[:rows]), wanted[rows], atol=1e-6):
                    wrong.append(rows)
                lz.which("rms_norm", X[:rows])
                calls[which] += 1
        except BaseException as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=call, args=(i, rows)) for i, rows in enumerate(wanted)]
    for thread in threads:
        thread.start()
    try:
        for i in range(50):
            lz.register_kernel(
                operation="norm.rms",
                kernel_id=f"coming.k{i}",
                platform="cpu",
                supported_dtypes=["float32"],
                priority=90 + i % 10,
            )(right)
            assert lz.which("rms_norm", X).kernel_id == f"coming.k{i}"
            lz.unregister_kernel(f"coming.k{i}")
        # Every thread has been at it meanwhile.
        while min(calls) == 0 and not wrong:
            lz.rms_norm(X)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert wrong == [] and not any(thread.is_alive() for thread in threads)
    assert not lz.which("rms_norm", X).kernel_id.startswith("coming.")


# --- nothing is kept --------------------------------------------------------------------------------------------------


def test_no_reference_is_lost_or_kept() -> None:
    q, window, layout, scale = torch.randn(1, 4, 2, 8), (2, 0), "BSHD", 0.731

    def counts() -> list[int]:
        return [sys.getrefcount(thing) for thing in (q, window, layout, scale, None)]

    for _ in range(3):
        lz.attention(q, q, q, scale=scale, window=window, layout=layout)
    before = counts()
    for _ in range(2000):
        lz.attention(q, q, q, scale=scale, window=window, layout=layout)
    after = counts()
    assert after[:4] == before[:4] and abs(after[4] - before[4]) < 100


def test_a_kernel_that_was_taken_away_is_let_go() -> None:
    def kernel(input: torch.Tensor, eps: float) -> torch.Tensor:
        return input + eps

    held = weakref.ref(kernel)
    lz.register_kernel(
        operation="norm.rms", kernel_id="held.norm", platform="cpu", supported_dtypes=["float32"], priority=99
    )(kernel)
    del kernel
    lz.rms_norm(X)
    assert held() is not None
    lz.unregister_kernel("held.norm")
    lz.rms_norm(X)
    gc.collect()
    assert held() is None
