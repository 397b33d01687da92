"""Settings for a while, entered and left in random sequences, against a model of them."""

from __future__ import annotations

import contextvars
from contextlib import AbstractContextManager
from typing import Any

import layerzero as lz
import pytest
from faults.states import fresh
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from strategies import SCALE
from told_apart import X, in_a_thread, served
from torch import Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning"),
    pytest.mark.usefixtures("two_kernels"),
]

SOURCES = strategies.lists(strategies.sampled_from(["one", "two"]), unique=True, max_size=2)


class Contexts(RuleBasedStateMachine):
    """Enters and leaves blocks, configures, locks and calls in any order; every call is served as the model says."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[AbstractContextManager[None], dict[str, Any]]] = []
        self.code: dict[str, Any] = {}
        self.locked: str | None = None

    @initialize()
    def begin(self) -> None:
        fresh()

    # The model.

    def said(self, frames: list[dict[str, Any]]) -> dict[str, Any]:
        """What is in force in these blocks, the innermost last."""
        found: dict[str, Any] = {"prefer": [], "avoid": [], "deterministic": False, "enabled": True} | self.code
        for key in ("prefer", "avoid"):
            lists = [frame[key] for frame in reversed(frames) if key in frame]
            if lists:
                found[key] = list(dict.fromkeys(name for names in lists for name in names))
        for key in ("deterministic", "enabled"):
            found[key] = next((frame[key] for frame in reversed(frames) if key in frame), found[key])
        return found

    def expected(self, frames: list[dict[str, Any]]) -> str | None:
        """Who is to serve a call; `None` when a lock leaves nobody."""
        said = self.said(frames)
        if not said["enabled"]:
            return "lz_cpu"
        scores = {"one": 60, "two": 55, "torch": 50}
        for name in scores:
            if name in said["prefer"]:
                scores[name] += 19 + len(said["prefer"]) - said["prefer"].index(name)
            if name in said["avoid"]:
                scores[name] -= 50
        if said["deterministic"]:
            del scores["one"]
        if self.locked is not None:
            scores = {name: score for name, score in scores.items() if name == self.locked}
        return max(scores, key=lambda name: scores[name], default=None)

    def holds(self, frames: list[dict[str, Any]], x: Tensor) -> None:
        """A call is served as it should be."""
        wanted = self.expected(frames)
        if wanted is None:
            with pytest.raises(lz.NoKernelFoundError):
                lz.rms_norm(x)
        else:
            assert served(x) == wanted

    @property
    def frames(self) -> list[dict[str, Any]]:
        """What each open block says, the innermost last."""
        return [frame for _, frame in self.open]

    def enter(self, block: AbstractContextManager[None], **frame: Any) -> None:
        """Enters a block."""
        block.__enter__()
        self.open.append((block, frame))

    # What may happen.

    @precondition(lambda self: len(self.open) < 4)
    @rule(names=SOURCES)
    def prefer(self, names: list[str]) -> None:
        self.enter(lz.prefer(*names), prefer=names)

    @precondition(lambda self: len(self.open) < 4)
    @rule(names=SOURCES)
    def avoid(self, names: list[str]) -> None:
        self.enter(lz.avoid(*names), avoid=names)

    @precondition(lambda self: len(self.open) < 4)
    @rule()
    def disable(self) -> None:
        self.enter(lz.disabled(), enabled=False)

    @precondition(lambda self: len(self.open) < 4)
    @rule(on=strategies.booleans())
    def make_deterministic(self, on: bool) -> None:
        self.enter(lz.deterministic(on), deterministic=on)

    @precondition(lambda self: self.open)
    @rule()
    def leave(self) -> None:
        block, _ = self.open.pop()
        block.__exit__(None, None, None)

    @precondition(lambda self: self.open)
    @rule()
    def leave_by_an_exception(self) -> None:
        block, _ = self.open.pop()
        error = ZeroDivisionError()
        assert not block.__exit__(ZeroDivisionError, error, None)

    @rule(
        key=strategies.sampled_from(["prefer", "avoid", "deterministic", "enabled"]),
        names=SOURCES,
        on=strategies.booleans(),
    )
    def configure(self, key: str, names: list[str], on: bool) -> None:
        if key in ("prefer", "avoid"):
            lz.configure(**{f"{key}_sources": names})
            self.code[key] = names
        else:
            lz.configure(**{key: on})
            self.code[key] = on

    @rule(key=strategies.sampled_from(["prefer", "avoid", "deterministic", "enabled"]))
    def take_back(self, key: str) -> None:
        lz.configure(**{f"{key}_sources" if key in ("prefer", "avoid") else key: None})
        self.code.pop(key, None)

    @rule(kernel=strategies.sampled_from(["one", "two"]))
    def lock(self, kernel: str) -> None:
        lz.force_kernel("rms_norm", f"{kernel}.norm")
        self.locked = kernel

    @rule()
    def unlock(self) -> None:
        lz.unforce_kernel("norm.rms")
        self.locked = None

    @rule()
    def forget(self) -> None:
        lz.reset()
        self.code, self.locked = {}, None

    @rule(rows=strategies.sampled_from([2, 4]), times=strategies.integers(1, 3))
    def call(self, rows: int, times: int) -> None:
        for _ in range(times):
            self.holds(self.frames, X[:rows])

    @rule()
    def call_elsewhere(self) -> None:
        """A thread that begins now is in no block; one that is given a copy is in all of them."""
        in_a_thread(lambda: self.holds([], X) or True)
        copied = contextvars.copy_context()
        in_a_thread(lambda: copied.run(lambda: self.holds(self.frames, X)) or True)

    @invariant()
    def the_same_call_is_served_as_it_should_be(self) -> None:
        self.holds(self.frames, X)

    def teardown(self) -> None:
        while self.open:
            self.leave()
        fresh()


class TestContexts(Contexts.TestCase):  # type: ignore[misc,name-defined]
    """With both kernels registered."""

    settings = settings(max_examples=int(100 * SCALE), stateful_step_count=30)
