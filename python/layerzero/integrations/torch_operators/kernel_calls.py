"""One kernel of a call, by itself: the function that runs it, and its arguments."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from layerzero import layouts, loading
from layerzero.integrations.torch_operators.fakes import DEFAULT_LAYOUT
from layerzero.integrations.torch_operators.operators import LOWERING, Operator

_EVERYWHERE = -1


def function_of(kernel: str) -> Callable[..., Any] | None:
    """The Python function of a kernel; `None` where it is native code."""
    return loading.FUNCTIONS.get(kernel)


def traced_of(kernel: str) -> Callable[..., Any] | None:
    """What a kernel's function offers to compilers: the same call, whose launches become part of the graph."""
    found: Callable[..., Any] | None = getattr(function_of(kernel), "traced", None)
    return found


def named(operator: Operator, args: tuple[Any, ...]) -> dict[str, Any]:
    """All arguments of a call by name, with its layout and its window as kernels take them."""
    values = dict(zip(operator.names, operator.fill(args), strict=True))
    values.pop(LOWERING, None)
    default = values.pop(DEFAULT_LAYOUT, None)
    if "layout" in values and values["layout"] is None:
        values["layout"] = layout_of(operator, values, default)
    if "window" in values:
        window = values.pop("window")
        values["window_left"], values["window_right"] = _EVERYWHERE, _EVERYWHERE
        if window is not None:
            values["window_left"] = window[0]
            values["window_right"] = window[1] if len(window) == 2 else _EVERYWHERE
    return values


def layout_of(operator: Operator, values: dict[str, Any], default: str | None) -> str:
    """The layout of a call that does not say it."""
    tensor = next(values[name] for name in ("query", "input") if name in values)
    if tensor.dim() == 3:
        return "NHD"
    return default if default is not None else layouts.here(str(operator.layout_setting))


def arguments(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a kernel's function; `None` where it takes one that the call does not have."""
    names = _parameters(function)
    if any(name not in values for name in names):
        return None
    return {name: values[name] for name in names}


@lru_cache(maxsize=256)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Their names: asked once, since a graph asks at every call."""
    return tuple(loading.parameters(function))
