"""Checks that torch's state is read right by the native side."""

from __future__ import annotations

from collections.abc import Callable


def symbols_agree(look: Callable[[], tuple[bool, bool, bool]]) -> bool:
    """Puts this thread into each state in turn and compares what ``look`` sees: gradients, determinism, anything special.

    Symbols of torch's libraries are looked up by name; a version in which one of them means something else must be
    found out here, and is then read through torch's Python functions instead.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    special = bool(torch._C._len_torch_dispatch_stack()) or torch._C._is_any_autocast_enabled()
    answers = [look() == (torch.is_grad_enabled(), deterministic, special)]
    if special:
        # In the middle of something special nothing can be told apart.
        return False
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            answers.append(look() == (grad, deterministic, False))
    for device in ("cpu", "cuda"):
        was = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(device, True)
        try:
            answers.append(look()[2])
        finally:
            torch.set_autocast_enabled(device, was)
    with TorchDispatchMode():  # type: ignore[no-untyped-call]
        answers.append(look()[2])
    try:
        # Not through `use_deterministic_algorithms`, which imports the compiler.
        torch._C._set_deterministic_algorithms(not deterministic, warn_only=True)
        answers.append(look()[1] is not deterministic)
    finally:
        torch._C._set_deterministic_algorithms(deterministic, warn_only=warn_only)
    answers.append(not look()[2])
    return all(answers)


def recorder() -> str | None:
    """Who is recording torch's operations and would miss what a native kernel does: forward derivatives, or a trace."""
    import torch
    from torch.autograd import forward_ad

    if forward_ad._current_level >= 0:
        return "forward-mode derivatives"
    return "torch.jit.trace" if torch._C._get_tracing_state() is not None else None
