"""Exceptions that come out of the caller's own code while a kernel runs.

A kernel's failure is answered with another kernel, and counted. But a kernel also runs code that is not its own: torch
calls hooks for the tensors it saves, and the overrides of modes and of tensor subclasses; Python calls signal handlers.
What these raise is meant for the caller (activation checkpointing ends a recomputation this way, a SIGALRM handler a
call that takes too long). It is passed on as it is, and counts as nobody's failure.

The exception's traceback tells whose it is: the functions that may be called on the caller's behalf are known, so a
frame of one of them is looked for.
"""

from __future__ import annotations

import dis
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, TracebackType
from typing import Any

#: Control flow by its class alone, for where no frame is left to tell: ``(module, class)``, looked at once imported.
_CONTROL_FLOW = (
    ("torch.utils.checkpoint", "_StopRecomputationError"),
    ("bdb", "BdbQuit"),
)


def interruption(error: BaseException, arguments: Iterable[object]) -> BaseException | None:
    """The exception to pass on to the caller, if a kernel's run was ended by the caller's code; else ``None``.

    ``arguments`` are the call's: tensors of subclasses bring overrides. A kernel may have raised an exception of its own
    ``from`` the caller's; then the caller's is given.
    """
    hooks, overrides = set(_codes(_hooks())), set(_codes(_overrides(arguments)))
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        # A panic of a Rust library is no `Exception` either, and is that library's failure.
        interrupt = not isinstance(current, Exception) and type(current).__name__ != "PanicException"
        if interrupt or isinstance(current, _control_flow()):
            return current
        if _came_from(current.__traceback__, hooks, overrides):
            return current
        seen.add(id(current))
        current = current.__cause__
    return None


def _control_flow() -> tuple[type[BaseException], ...]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in _CONTROL_FLOW)
    return tuple(kind for kind in found if isinstance(kind, type) and issubclass(kind, BaseException))


def _hooks() -> Iterator[object]:
    """Functions in which no part of a kernel runs: whatever is raised below them is theirs."""
    torch = sys.modules.get("torch")
    if torch is not None:
        pack_and_unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
        yield from pack_and_unpack or ()
    # Python runs signal handlers in the main thread alone.
    if threading.current_thread() is threading.main_thread():
        yield from (signal.getsignal(number) for number in signal.valid_signals())


def _overrides(arguments: Iterable[object]) -> Iterator[object]:
    """Functions that are called in the place of torch's, and mostly call those in turn."""
    if "torch" not in sys.modules:
        return
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    function_modes: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    kinds = {type(mode) for mode in (*function_modes, *_get_current_dispatch_mode_stack())}
    kinds |= {type(argument) for argument in arguments}
    for kind in kinds:
        for name in ("__torch_function__", "__torch_dispatch__"):
            yield getattr(kind, name, None)


def _codes(functions: Iterable[object]) -> Iterator[CodeType]:
    """The code of functions, methods, partial functions, and objects that can be called."""
    for given in functions:
        function: Any = given
        for _ in range(8):
            if isinstance(function, MethodType):
                function = function.__func__
            elif hasattr(function, "func") and callable(function.func):
                function = function.func
            elif isinstance(function, FunctionType):
                break
            else:
                function = next(
                    (vars(kind)["__call__"] for kind in type(function).__mro__ if "__call__" in vars(kind)), None
                )
        if isinstance(function, FunctionType):
            yield function.__code__


def _came_from(traceback: TracebackType | None, hooks: set[CodeType], overrides: set[CodeType]) -> bool:
    """Whether an exception was raised by one of these functions, or by what they call besides torch."""
    last: TracebackType | None = None
    while traceback is not None:
        if traceback.tb_frame.f_code in hooks:
            return True
        if traceback.tb_frame.f_code in overrides:
            last = traceback
        traceback = traceback.tb_next
    if last is None:
        return False
    # An override that hands the call on to torch is not the one that failed.
    if last.tb_next is None:
        return _raises(last)
    return not _is_torchs(last.tb_next.tb_frame.f_globals.get("__name__"))


def _raises(entry: TracebackType) -> bool:
    """Whether a frame raised the exception itself; else it came out of a native function it called."""
    code = entry.tb_frame.f_code.co_code
    return 0 <= entry.tb_lasti < len(code) and dis.opname[code[entry.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


def _is_torchs(module: object) -> bool:
    return isinstance(module, str) and (module == "torch" or module.startswith("torch."))
