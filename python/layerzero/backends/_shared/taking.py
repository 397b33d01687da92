"""Kernels that get the arguments of a call as one object: what they take is then written down once."""

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, TypeVar

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])


def named(function: Function, names: Sequence[str]) -> Function:
    """The function, which says of itself that it takes these arguments."""
    signature = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def taking(call: Any, names: tuple[str, ...], run: Callable[[Any], Result]) -> Callable[..., Result]:
    """A kernel that takes these arguments, the first fields of the named tuple `call`. Other fields have their defaults."""
    if names != call._fields[: len(names)]:
        raise TypeError(f"{', '.join(names)} are not the first fields of {call.__name__}")

    def kernel(*given: Any, **by_name: Any) -> Result:
        return run(call(*given, **by_name))

    return named(kernel, names)
