"""Settings for a while, with several at work: threads begin without them, tasks inherit them."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import layerzero as lz
import pytest
from told_apart import in_a_thread, served

pytestmark = [
    pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning"),
    pytest.mark.usefixtures("two_kernels"),
]


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
