"""Settings for a while: `with lz.prefer(…)` and the others hold for the calls inside, and for no other call."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from faults.states import fresh
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from processes import answer
from torch import Tensor

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")


def register() -> None:
    """Two kernels whose results tell them apart; the first is preferred, the second deterministic."""
    given = {"operation": "norm.rms", "platform": "cpu", "supported_dtypes": ["float32"]}

    @lz.register_kernel(kernel_id="one.norm", priority=60, **given)
    def one(input: Tensor, eps: float) -> Tensor:
        return input + 1.0

    @lz.register_kernel(kernel_id="two.norm", priority=55, deterministic=True, **given)
    def two(input: Tensor, eps: float) -> Tensor:
        return input + 2.0


def unregister() -> None:
    """Takes them away."""
    for kernel in ("one.norm", "two.norm"):
        lz.unregister_kernel(kernel)


@pytest.fixture(autouse=True)
def two_kernels() -> Iterator[None]:
    """Both kernels, and nothing configured."""
    register()
    fresh()
    yield
    fresh()
    unregister()


def served(x: Tensor = X) -> str:
    """Who serves a call, by what it gives."""
    result = lz.rms_norm(x)
    if torch.equal(result, x + 1.0):
        return "one"
    if torch.equal(result, x + 2.0):
        return "two"
    right = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(result.double(), right, rtol=1e-5, atol=1e-5)
    told = str(lz.which("rms_norm", x)["kernel_id"])
    assert told.startswith(("torch.", "lz_cpu.ref."))
    return told.partition(".")[0]


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What the work gives in a thread of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(60)
    (result,) = found
    return result


# --- each of them, alone and nested -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "wanted"),
    [
        (lambda: lz.prefer("two"), "two"),
        (lambda: lz.prefer("one"), "one"),
        (lambda: lz.prefer("two", "one"), "one"),
        (lambda: lz.avoid("one"), "two"),
        (lambda: lz.avoid("one", "two"), "torch"),
        (lambda: lz.disabled(), "lz_cpu"),
        (lambda: lz.deterministic(), "two"),
        (lambda: lz.deterministic(False), "one"),
        (lambda: lz.prefer("nobody"), "one"),
        (lambda: lz.prefer(), "one"),
    ],
)
def test_the_calls_inside_and_no_others(context: Callable[[], Any], wanted: str) -> None:
    for _ in range(3):
        assert served() == "one"
        with context():
            assert [served(), served(), served()] == [wanted] * 3
            assert served(X[:3]) == wanted
            # What is asked is answered for the calls made here.
            asked = lz.which("rms_norm", X)["kernel_id"]
            assert asked == lz.explain("rms_norm", X).chosen and asked.startswith(wanted)
        assert served() == "one" and lz.which("rms_norm", X)["kernel_id"] == "one.norm"


def test_preferring_is_by_order_and_only_by_points() -> None:
    with lz.prefer("two", "one"):
        scores = {c.kernel_id: c.score for c in lz.explain("rms_norm", X).candidates if c.accepted}
    # 21 and 20 points: not enough to overturn a priority of five more.
    assert scores["two.norm"] == 76.0 and scores["one.norm"] == 80.0


def test_the_inner_one_comes_first() -> None:
    with lz.prefer("two"):
        assert served() == "two"
        with lz.prefer("one"):
            assert served() == "one"
            with lz.deterministic():
                assert served() == "two"
                with lz.deterministic(False):
                    assert served() == "one"
                    with lz.disabled():
                        assert served() == "lz_cpu"
                    assert served() == "one"
                assert served() == "two"
            with lz.avoid("one"):
                assert served() == "two"
            assert served() == "one"
        assert served() == "two"
    assert served() == "one"


def test_preferences_of_several_blocks_add_up() -> None:
    with lz.prefer("torch"):
        assert served() == "torch"
        with lz.prefer("two"):
            # 21 points for the inner one, 20 for the outer.
            scores = {c.kernel_id: c.score for c in lz.explain("rms_norm", X).candidates if c.accepted}
            assert scores["two.norm"] == 76.0 and scores["torch.rms_norm"] == 70.0 and scores["one.norm"] == 60.0


def test_an_exception_that_passes_restores_the_outer_one() -> None:
    with lz.prefer("two"):
        with pytest.raises(ZeroDivisionError), lz.disabled():
            assert served() == "lz_cpu"
            raise ZeroDivisionError
        assert served() == "two"
    with pytest.raises(KeyboardInterrupt), lz.avoid("one"):
        raise KeyboardInterrupt
    assert served() == "one"


def test_a_failed_call_inside_leaves_nothing_behind() -> None:
    with lz.prefer("two"):
        for _ in range(3):
            with pytest.raises(lz.InvalidCallError):
                lz.rms_norm(X, torch.ones(3))
        assert served() == "two"
    assert served() == "one"


@pytest.mark.parametrize("bad", [3, None, "", ["one"]])
def test_what_is_no_library_is_refused_at_the_door(bad: Any) -> None:
    with pytest.raises((lz.ConfigurationError, TypeError)) as caught, lz.prefer(bad):
        raise AssertionError("entered")
    assert "prefer_sources" in str(caught.value) or isinstance(caught.value, TypeError)
    assert served() == "one"


def test_as_decorators() -> None:
    @lz.prefer("two")
    def preferring() -> str:
        return served()

    @lz.disabled()
    def without() -> str:
        return served()

    @lz.deterministic()
    @lz.avoid("two")
    def both() -> str:
        return served()

    for _ in range(3):
        assert (preferring(), without(), both(), served()) == ("two", "lz_cpu", "torch", "one")
    with lz.avoid("one"):
        assert preferring() == "two" and without() == "lz_cpu"
    assert preferring.__name__ == "preferring"


def test_a_kernel_sees_the_context_it_is_called_in() -> None:
    """Calls that a kernel makes itself are made in the same context."""

    def outer(input: Tensor) -> Tensor:
        return lz.rms_norm(input)

    lz.register_kernel(
        operation="activation.gelu", kernel_id="nested.gelu", platform="cpu", supported_dtypes=["float32"], priority=99
    )(outer)
    try:
        for _ in range(3):
            assert torch.equal(lz.gelu(X), X + 1.0)
            with lz.prefer("two"):
                assert torch.equal(lz.gelu(X), X + 2.0)
    finally:
        lz.unregister_kernel("nested.gelu")


@pytest.mark.parametrize("door", ["out", "numpy", "operator", "compiled", "vmap"])
def test_whichever_way_a_call_comes_in(door: str) -> None:
    compiled = torch.compile(lambda x: lz.rms_norm(x), fullgraph=True, backend="aot_eager")
    doors: dict[str, Callable[[], Any]] = {
        "out": lambda: lz.rms_norm(X, out=torch.empty_like(X)),
        "numpy": lambda: torch.from_numpy(lz.rms_norm(X.numpy())),
        "operator": lambda: torch.ops.layerzero.rms_norm(X),
        "compiled": lambda: compiled(X),
        "vmap": lambda: torch.vmap(lz.rms_norm)(X),
    }
    for _ in range(3):
        assert torch.equal(doors[door](), X + 1.0)
        with lz.prefer("two"):
            assert torch.equal(doors[door](), X + 2.0)


# --- threads and tasks ------------------------------------------------------------------------------------------------


def test_a_thread_begins_without_and_may_be_given_it() -> None:
    with lz.prefer("two"):
        assert in_a_thread(served) == "one"
        copied = contextvars.copy_context()
        assert in_a_thread(lambda: copied.run(served)) == "two"
        assert served() == "two"
    # What was copied stays as it was.
    assert copied.run(served) == "two" and in_a_thread(lambda: copied.run(served)) == "two"
    assert served() == "one"


def test_threads_do_not_disturb_each_other() -> None:
    """Eight threads in step, each in a context of its own, on the same calls."""
    contexts: list[tuple[Callable[[], AbstractContextManager[None]], str]] = [
        (lambda: lz.prefer("two"), "two"),
        (lambda: lz.disabled(), "lz_cpu"),
        (lambda: lz.avoid("one", "two"), "torch"),
        (lambda: lz.prefer("one"), "one"),
    ]
    step, wrong = threading.Barrier(8, timeout=60), []

    def work(i: int) -> None:
        try:
            for round in range(20):
                context, wanted = contexts[(i + round) % 4]
                with context():
                    step.wait()
                    found = {served() for _ in range(5)}
                    if found != {wanted}:
                        wrong.append((i, round, found, wanted))
                step.wait()
                if served() != "one":
                    wrong.append((i, round, "outside"))
        except BaseException as error:
            wrong.append(error)
            step.abort()
            raise

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == [] and not any(thread.is_alive() for thread in threads)


def test_tasks_inherit_at_their_creation_and_are_then_their_own() -> None:
    async def main() -> None:
        inside, outside = asyncio.Event(), asyncio.Event()
        seen: list[str] = []

        async def child() -> None:
            seen.append(served())
            with lz.disabled():
                seen.append(served())
                inside.set()
                # The parent's block ends meanwhile.
                await outside.wait()
                seen.append(served())
            seen.append(served())

        with lz.prefer("two"):
            task = asyncio.create_task(child())
            await inside.wait()
            assert served() == "two"
        assert served() == "one"
        outside.set()
        await task
        assert seen == ["two", "lz_cpu", "lz_cpu", "two"], "it outlives the block it was made in"
        assert served() == "one"

    asyncio.run(main())
    assert served() == "one"


def test_many_tasks_interleaved() -> None:
    contexts = [(lambda: lz.prefer("two"), "two"), (lambda: lz.disabled(), "lz_cpu"), (lambda: lz.avoid("two"), "one")]

    async def worker(i: int) -> None:
        for round in range(10):
            context, wanted = contexts[(i + round) % 3]
            with context():
                for _ in range(3):
                    assert served() == wanted
                    await asyncio.sleep(0)
            assert served() == "one"

    async def main() -> None:
        await asyncio.gather(*(worker(i) for i in range(12)))

    asyncio.run(main())


def test_work_given_to_a_thread_by_asyncio_inherits() -> None:
    async def main() -> tuple[str, str]:
        with lz.prefer("two"):
            inside = await asyncio.to_thread(served)
        return inside, await asyncio.to_thread(served)

    assert asyncio.run(main()) == ("two", "one")


# --- beside everything else that may be said --------------------------------------------------------------------------


def test_a_change_from_code_reaches_the_calls_of_a_block_that_says_nothing_about_it() -> None:
    with lz.avoid("nobody"):
        assert served() == "one"
        lz.configure(prefer_sources=["two"])
        assert served() == "two"
        lz.lock("rms_norm", "one.norm")
        assert served() == "one"
        lz.unlock("rms_norm")
        lz.reset()
        assert served() == "one"


def test_a_block_stands_above_code() -> None:
    lz.configure(prefer_sources=["two"], deterministic=True)
    assert served() == "two"
    with lz.prefer("one"):
        assert served() == "two", "deterministic still"
        with lz.deterministic(False):
            assert served() == "one"
    assert served() == "two"


def test_the_call_itself_stands_above_all() -> None:
    lz.lock("rms_norm", "one.norm")
    with lz.avoid("one"):
        assert served() == "one"
    lz.unlock("rms_norm")
    with lz.prefer("two"):
        assert torch.equal(lz.run_kernel("one.norm", X), X + 1.0)
        # What torch is told of determinism is said of the call.
        with lz.deterministic(False), lz.prefer("one"):
            torch.use_deterministic_algorithms(True)
            try:
                assert served() == "two"
            finally:
                torch.use_deterministic_algorithms(False)
            assert served() == "one"


def test_a_kernel_registered_inside_is_there() -> None:
    with lz.prefer("three"):
        assert served() == "one"

        @lz.register_kernel(
            operation="norm.rms", kernel_id="three.norm", platform="cpu", supported_dtypes=["float32"], priority=45
        )
        def three(input: Tensor, eps: float) -> Tensor:
            return input + 3.0

        assert torch.equal(lz.rms_norm(X), X + 3.0)
        lz.unregister_kernel("three.norm")
        assert served() == "one"


LAYERS = """
    import os, sys
    sys.path.insert(0, {tests!r})
    import logging, warnings
    warnings.simplefilter("ignore")
    import layerzero as lz
    from test_control_contexts import register, served
    import torch
    register()
    said = [served()]
    lz.configure(prefer_sources=["two"])
    said.append(served())
    with lz.prefer("one"):
        said.append(served())
        said.append("two" if torch.equal(lz.run_kernel("two.norm", torch.ones(2, 8)), torch.ones(2, 8) + 2) else "?")
    said.append(served())
    lz.reset()
    said.append(served())
    origin = {{s.key: s.origin for s in lz.settings()}}["prefer_sources"]
    answer([said, origin])
"""


@pytest.mark.parametrize("by", ["nothing", "file", "environment", "both"])
def test_each_layer_stands_above_the_ones_below(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """call > context > code > environment > file; each in turn says the contrary of the one below."""
    monkeypatch.chdir(tmp_path)
    below, layer = "one", "default"
    if by in ("file", "both"):
        (tmp_path / "layerzero.yaml").write_text("version: 1\nprefer_sources: [two]\n")
        below, layer = "two", "project_file"
    if by in ("environment", "both"):
        monkeypatch.setenv("LAYERZERO_PREFER", "one" if by == "both" else "two")
        below, layer = ("one" if by == "both" else "two"), "environment"
    said, origin = answer(LAYERS.format(tests=os.path.dirname(__file__)), path=[Path(__file__).parent])
    assert said == [below, "two", "one", "two", "two", below]
    assert origin["layer"] == layer


def test_there_are_only_so_many_different_blocks() -> None:
    """Each is kept for the life of the process, so that their number is bounded; the error is the caller's."""
    found = answer(
        """
        import layerzero as lz, torch
        made, code = 0, None
        try:
            for i in range(2000):
                with lz.prefer(f"library{i}"):
                    made += 1
        except lz.ConfigurationError as error:
            code = str(error)
        with lz.prefer("library0"):
            lz.rms_norm(torch.ones(2, 8))
        answer([made, code])
        """
    )
    assert found[0] == 1024 and "1024" in found[1] and "hint" in found[1]


# --- random sequences, against a model --------------------------------------------------------------------------------

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
        lz.lock("rms_norm", f"{kernel}.norm")
        self.locked = kernel

    @rule()
    def unlock(self) -> None:
        lz.unlock("norm.rms")
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

    settings = settings(max_examples=100, stateful_step_count=30)
