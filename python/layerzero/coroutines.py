"""Generators and coroutines whose every step runs in a place of its own.

What a function with ``yield`` or ``await`` does after it was called is done whenever somebody takes the next step, and by
then the place it was called in may be left. Here each step goes through a function that puts it where it belongs.
"""

from __future__ import annotations

import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any

#: Calls a function with its arguments, somewhere.
Place = Callable[..., Any]


def _steps(work: Any, place: Place) -> Generator[Any, Any, Any]:
    step, given = work.send, None
    while True:
        try:
            value = place(step, given)
        except StopIteration as end:
            return end.value
        try:
            step, given = work.send, (yield value)
        except GeneratorExit:
            place(work.close)
            raise
        except BaseException as error:  # noqa: BLE001 - whatever is thrown in is the other one's to handle
            step, given = work.throw, error


_waits = types.coroutine(_steps)


async def _awaited(work: Coroutine[Any, Any, Any], place: Place) -> Any:
    return await _waits(work, place)


async def _async_steps(work: AsyncGenerator[Any, Any], place: Place) -> AsyncGenerator[Any, Any]:
    step: Callable[[Any], Any] = work.asend
    given: Any = None
    while True:
        try:
            value = await _waits(place(step, given), place)
        except StopAsyncIteration:
            return
        try:
            step, given = work.asend, (yield value)
        except GeneratorExit:
            await _waits(place(work.aclose), place)
            raise
        except BaseException as error:  # noqa: BLE001 - whatever is thrown in is the other one's to handle
            step, given = work.athrow, error


_CARRIED: dict[type, Callable[[Any, Place], Any]] = {
    types.GeneratorType: _steps,
    types.CoroutineType: _awaited,
    types.AsyncGeneratorType: _async_steps,
}


def carried(result: Any, place: Place) -> Any:
    """What a function gave, with the steps it has still to take, if any, taken in a place."""
    carry = _CARRIED.get(type(result))
    return result if carry is None else carry(result, place)
