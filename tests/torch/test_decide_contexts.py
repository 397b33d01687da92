"""Who is inside a plan, and who is not: nesting, exceptions, generators, tasks, threads; and torch's compiler."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import layerzero as lz
import pytest
import torch
from faults.states import fresh
from layerzero import control
from torch import Tensor, nn

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
NAMES = ("one", "two", "three")

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")


@pytest.fixture(autouse=True)
def three_kernels() -> Iterator[None]:
    """Kernels whose results tell them apart, the first preferred."""

    def register(at: int, name: str) -> None:
        given = {"operation": "norm.rms", "platform": "cpu", "supported_dtypes": ["float32"]}

        @lz.register_kernel(kernel_id=f"{name}.norm", priority=60 - at, **given)
        def kernel(input: Tensor, eps: float) -> Tensor:
            return input + float(at + 1)

    for at, name in enumerate(NAMES):
        register(at, name)
    fresh()
    yield
    assert control.frames() == (), "everybody has left"
    fresh()
    for name in NAMES:
        lz.unregister_kernel(f"{name}.norm")


def served(x: Tensor = X) -> str:
    """Who serves a call made here."""
    name = NAMES[round((lz.rms_norm(x) - x).mean().item()) - 1]
    assert lz.which("rms_norm", x).kernel_id == f"{name}.norm"
    return name


def plan(work: Callable[..., Any], kernel: str = "two") -> lz.Plan:
    """A plan of some work, that decided for a kernel."""
    with lz.prefer(kernel):
        found = lz.decide(work)
        with found.inside():
            assert served() == kernel
    assert [decision.kernel_id for decision in found.decisions] == [f"{kernel}.norm"]
    return found


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What the work gives in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


# --- nested, and left by an exception -----------------------------------------------------------------------------------


def test_the_innermost_plan_decides() -> None:
    inner = plan(served, "three")

    def work() -> list[str]:
        return [served(), inner(), served()]

    outer = plan(work, "two")
    assert outer() == ["two", "three", "two"] and served() == "one"
    assert plan(outer, "three")() == ["two", "three", "two"], "of a plan"


def test_what_the_inner_plan_does_not_decide_the_outer_does() -> None:
    x = torch.zeros(4, 16)
    inner = lz.decide(lz.rms_norm, X)
    with lz.prefer("two"):
        outer = lz.decide(lambda x: inner(x), x)
    assert torch.equal(outer(x), x + 2.0) and torch.equal(outer(X), X + 1.0)


def test_a_plan_inside_itself() -> None:
    def work(depth: int = 3) -> list[str]:
        return [served(), *(itself(depth - 1) if depth else []), served()]

    itself = plan(work)
    assert itself() == ["two"] * 8 and served() == "one"


def test_contexts_and_plans_nest() -> None:
    def work() -> list[str]:
        with lz.avoid("two"):
            inside = served()
        with lz.disabled():
            assert lz.which("rms_norm", X).kernel_id.startswith("lz_cpu.ref.")
        return [served(), inside]

    found = plan(work)
    # What is avoided or preferred moves scores, and a plan does not go by them.
    assert found() == ["two", "two"]
    with lz.prefer("three"):
        assert found() == ["two", "two"] and served() == "three"
    with lz.disabled(), found.inside():
        assert lz.which("rms_norm", X).kernel_id.startswith("lz_cpu.ref.")


def test_it_is_left_by_an_exception_too() -> None:
    def work(fails: bool = True) -> str:
        if fails:
            raise LookupError(served())
        return served()

    found = plan(work)
    for _ in range(2):
        with pytest.raises(LookupError, match="two"):
            found()
        assert served() == "one" and control.frames() == ()
    assert found(fails=False) == "two"
    with pytest.raises(ZeroDivisionError), found.inside():
        raise ZeroDivisionError
    assert served() == "one"


# --- steps that are taken later -----------------------------------------------------------------------------------------


def test_every_step_of_a_generator_is_inside() -> None:
    left: list[str] = []

    def work(times: int) -> Iterator[str]:
        try:
            for _ in range(times):
                yield served()
        finally:
            left.append(served())

    found = plan(work)
    steps = found(3)
    for _ in range(3):
        assert next(steps) == "two" and served() == "one"
    assert next(steps, "over") == "over" and left.pop() == "two"
    assert list(found(2)) == ["two", "two"] and left.pop() == "two"
    steps = found(2)
    next(steps)
    steps.close()
    assert left.pop() == "two" and served() == "one"
    # Two at once, and the steps of one inside of the other.
    first, second = found(2), plan(work, "three")(2)
    assert [next(first), next(second), next(first), next(second)] == ["two", "three", "two", "three"]


def test_a_generator_is_sent_to_thrown_into_and_gives_a_result() -> None:
    def work() -> Any:
        got = []
        while len(got) < 2:
            try:
                got.append((yield served()))
            except LookupError as error:
                got.append(str(error))
        return got

    steps = plan(work)()
    assert next(steps) == "two" and steps.send("a") == "two"
    with pytest.raises(StopIteration) as end:
        steps.throw(LookupError("b"))
    assert end.value.value == ["a", "b"] and served() == "one"


def test_coroutines_and_async_generators() -> None:
    async def one(before: asyncio.Event, after: asyncio.Event) -> list[str]:
        found = [served()]
        before.set()
        await after.wait()
        return [*found, served()]

    async def many() -> AsyncIterator[str]:
        yield served()
        await asyncio.sleep(0)
        yield served()

    two, three = plan(one, "two"), plan(one, "three")

    async def main() -> None:
        events = [asyncio.Event() for _ in range(3)]
        # Each waits until the next has begun: all three are under way at once.
        tasks = [
            asyncio.create_task(two(events[0], events[1])),
            asyncio.create_task(three(events[1], events[2])),
            asyncio.create_task(one(events[2], events[0])),
        ]
        assert served() == "one"
        assert await asyncio.gather(*tasks) == [["two"] * 2, ["three"] * 2, ["one"] * 2]
        assert [name async for name in plan(many)()] == ["two", "two"] and served() == "one"
        steps = plan(many, "three")()
        assert await anext(steps) == "three" and served() == "one"
        await steps.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(steps)
        # Whoever only sets out from inside stays inside.
        with two.inside():
            inside = asyncio.create_task(one(asyncio.Event(), events[0]))
        assert await inside == ["two", "two"] and served() == "one"

    asyncio.run(main())


def test_a_block_of_a_generator_lasts_over_its_steps() -> None:
    def work(times: int = 2) -> Iterator[str]:
        try:
            with lz.disabled():
                for _ in range(times):
                    yield reference()
                with inner.inside():
                    yield served_or_reference()
                yield reference()
            yield served()
        finally:
            left.append(served_or_reference())

    def reference() -> str:
        found = served_or_reference()
        assert found == "reference"
        return found

    def served_or_reference() -> str:
        return "reference" if lz.which("rms_norm", X).kernel_id.startswith("lz_cpu.ref.") else served()

    left: list[str] = []
    inner, found = plan(served, "three"), plan(lambda: work())
    for steps in (found(), lz.decide(lambda: work())()):
        taken = []
        for at in range(5):
            # The place a step is taken from is another one each time.
            with lz.prefer(NAMES[at % 3]):
                taken.append(next(steps))
                assert served() == NAMES[at % 3], "it is not left open outside"
            assert control.frames() == ()
        assert taken == ["reference"] * 4 + ["two"] and next(steps, "over") == "over"
    assert left == ["two", "two"], "the second one learned it in the fifth step"
    left.clear()
    # Left in the midst of it: it is closed inside, with what it has entered.
    steps = found()
    next(steps)
    steps.close()
    assert left.pop() == "two" and control.frames() == ()


def test_blocks_that_a_generator_enters_are_put_over_what_is_around_then() -> None:
    def work() -> Iterator[list[str]]:
        with lz.prefer("two"):
            yield seen()
            with lz.prefer("three"):
                yield seen()
                yield seen()
            yield seen()
        yield seen()

    def seen() -> list[str]:
        return [name for frame in control.frames() for name in frame.said.get("prefer_sources", ())]

    steps = lz.decide(work)()
    assert next(steps) == ["two"]
    with lz.prefer("one"):
        assert next(steps) == ["three", "two", "one"] and seen() == ["one"]
        with lz.prefer("lz_cpu"):
            assert next(steps) == ["three", "two", "lz_cpu", "one"]
        assert next(steps) == ["two", "one"] and seen() == ["one"]
    assert next(steps) == [] and next(steps, None) is None

    def chosen() -> Iterator[str]:
        with lz.avoid("one"):
            yield lz.which("rms_norm", X).kernel_id
            yield lz.which("rms_norm", X).kernel_id
            yield lz.which("rms_norm", X).kernel_id

    steps = lz.decide(chosen)()
    assert next(steps) == "two.norm"
    with lz.avoid("two"):
        assert next(steps) == "three.norm", "both are in force"
    assert next(steps) == "two.norm"


def test_a_block_of_a_coroutine_lasts_over_its_awaits() -> None:
    def now() -> tuple[str, int]:
        return lz.which("rms_norm", X).kernel_id, len(control.frames())

    async def one() -> list[tuple[str, int]]:
        seen = []
        with lz.disabled():
            seen.append(now())
            await asyncio.sleep(0)
            seen.append(now())
        return [*seen, now()]

    async def many() -> AsyncIterator[tuple[str, int]]:
        with lz.disabled():
            yield now()
            await asyncio.sleep(0)
            yield now()
        yield now()

    with lz.disabled():
        reference, _ = now()
    wanted = [(reference, 2), (reference, 2), ("two.norm", 1)]

    async def main() -> None:
        assert await plan(one)() == wanted and control.frames() == ()
        assert await asyncio.gather(plan(one)(), plan(one)()) == [wanted] * 2
        steps, seen = plan(many)(), []
        async for found in steps:
            seen.append(found)
            assert control.frames() == ()
        assert seen == wanted
        # A plan whose coroutine waits for that of another, inside of a block.
        inner = plan(one, "three")

        async def outside() -> list[tuple[str, int]]:
            with lz.avoid("one"):
                return [*await inner(), now()]

        assert await plan(outside)() == [(reference, 4), (reference, 4), ("three.norm", 3), ("two.norm", 2)]

    asyncio.run(main())


# --- threads --------------------------------------------------------------------------------------------------------------


def test_other_threads_are_not_inside() -> None:
    def work() -> list[str]:
        copied = contextvars.copy_context()
        return [served(), in_a_thread(served), in_a_thread(lambda: copied.run(served))]

    assert plan(work)() == ["two", "one", "two"]
    together = threading.Barrier(3, timeout=60)

    def many(rounds: int = 30) -> set[str]:
        seen = set()
        for _ in range(rounds):
            together.wait()
            seen.add(served())
        return seen

    with ThreadPoolExecutor(3) as pool:
        results = [pool.submit(work) for work in (plan(many, "two").model, plan(many, "three"), plan(many, "two"))]
        assert [result.result(120) for result in results] == [{"one"}, {"three"}, {"two"}]


def test_threads_that_teach_one_plan_lose_nothing() -> None:
    widths = range(8, 72, 8)
    together = threading.Barrier(4, timeout=60)

    def work(width: int) -> Tensor:
        together.wait()
        return lz.rms_norm(torch.zeros(4, width))

    taught = lz.decide(work)

    def teach(first: int) -> None:
        for at in range(len(widths)):
            taught(widths[(first + at) % len(widths)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(teach, range(4)))
    shapes = [decision.call["tensors"]["input"]["shape"] for decision in taught.decisions]
    assert sorted(shapes) == [[4, width] for width in widths], "each kind once"
    assert taught.mismatches == []


def test_a_plan_that_nobody_holds_is_gone() -> None:
    found = plan(served)
    assert found() == "two"
    gone = weakref.ref(found)
    del found
    gc.collect()
    assert gone() is None


# --- torch's compiler -----------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    """A norm, and something for a compiler to do."""

    def forward(self, x: Tensor) -> Tensor:
        """Twice a norm."""
        return lz.rms_norm(x) * 2


def compiled(work: Any, **options: Any) -> Any:
    """By torch, without generating code."""
    torch._dynamo.reset()
    return torch.compile(work, backend="eager", **options)


def doubled(name: str) -> Tensor:
    """What the model gives when a kernel serves."""
    return (X + NAMES.index(name) + 1.0) * 2


@pytest.mark.parametrize("inputs", [(X,), ()])
def test_a_plan_of_a_compiled_model(inputs: tuple[Tensor, ...]) -> None:
    model = Doubled()
    fast = compiled(model, fullgraph=True)
    with lz.prefer("two"):
        found = lz.decide(fast, *inputs)
        found(X)
    assert found.table.model_id == "Doubled" and [d.kernel_id for d in found.decisions] == ["two.norm"]
    for _ in range(2):
        torch.testing.assert_close(found(X), doubled("two"))
        # The same compiled code, outside.
        torch.testing.assert_close(fast(X), doubled("one"))


def test_a_compiled_plan() -> None:
    with lz.prefer("two"):
        found = lz.decide(Doubled(), X)
    fast = compiled(found)
    for _ in range(2):
        torch.testing.assert_close(fast(X), doubled("two"))
        torch.testing.assert_close(found.model(X), doubled("one"))
    whole = compiled(lambda x: found(x) + 1, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"lz\.decide\(torch\.compile\(model\)\)"):
        whole(X)
    assert control.frames() == ()
