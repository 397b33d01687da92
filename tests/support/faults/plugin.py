"""The plugin: a kernel for every operation, made from the schemas, which serves any call before all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import layerzero as lz
import torch
from layerzero import _native

from faults.kinds import HALF_WRITTEN, Fault

BACKEND = "lz_faults"
FLOATS = ["float64", "float32", "float16", "bfloat16", "int8"]
# What an operation that updates in place updates, by operation.
UPDATES = {
    "kv_cache.append": ("key_cache", "value_cache"),
    "kv_cache.compact": ("key_cache", "value_cache"),
}


@dataclass
class Going:
    """How the kernels go wrong now, and what they should give."""

    fault: Fault | None = None
    #: The right results; of an operation that updates in place, the tensors as they should be after it.
    answer: tuple[torch.Tensor, ...] = ()
    #: The operations they were called for.
    calls: list[str] = field(default_factory=list)


going = Going()


@contextmanager
def faulty(fault: Fault, answer: tuple[torch.Tensor, ...]) -> Iterator[list[str]]:
    """Has every kernel go wrong this way; gives the operations they are called for."""
    going.fault, going.answer, going.calls = fault, answer, []
    try:
        yield going.calls
    finally:
        going.fault, going.answer = None, ()


def kernel_id(op: str) -> str:
    """The kernel for an operation."""
    return f"{BACKEND}.{op}"


def operations() -> list[str]:
    """Every operation that can be called."""
    return [op for function in _native.functions() for op in function["ops"]]


def _run(op: str, arguments: dict[str, Any]) -> Any:
    nth = len(going.calls)
    going.calls.append(op)
    if going.fault is None:
        raise RuntimeError("nobody said how to go wrong")
    updated = [arguments[name] for name in UPDATES.get(op, ())]
    if not updated:
        return going.fault.spoil(tuple(t.clone() for t in going.answer), nth)
    try:
        # What is looked for in the values is put into them; all else is about what is returned.
        result = going.fault.spoil(going.answer if going.fault.checked else (), nth)
    except BaseException:
        # Broke off in the middle of it.
        _changed(updated[0], going.answer[0]).fill_(HALF_WRITTEN)
        raise
    for number, (tensor, value) in enumerate(zip(updated, going.answer, strict=True)):
        spoilt = going.fault.checked and bool(result[number].isnan().any())
        one = _changed(tensor, value)
        tensor.copy_(value)
        if spoilt:
            one.fill_(float("nan"))
    return None if going.fault.checked else result


def _changed(tensor: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """An element the call is to write: a view of it. A kernel writes nowhere else, however it goes wrong."""
    at = tuple((tensor != answer.to(tensor.dtype)).nonzero()[0].tolist())
    return tensor[at]


def _kernel(op: str, names: list[str]) -> Callable[..., Any]:
    """A function that takes an operation's arguments by their names: that is how it is asked what it takes."""
    made: dict[str, Any] = {"run": _run}
    pairs = ", ".join(f"{name!r}: {name}" for name in names)
    exec(f"def kernel({', '.join(names)}):\n    return run({op!r}, {{{pairs}}})", made)  # noqa: S102
    function: Callable[..., Any] = made["kernel"]
    return function


def _describe(op: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Everything the operation has, in every dtype it has."""
    kernel: dict[str, Any] = {
        "kernel_id": kernel_id(op),
        "priority": 100,
        "dtypes": FLOATS,
        "requires_layouts": schema["layouts"] or ["strided"],
        "inputs": {name: {} for name, optional in schema["inputs"].items() if optional},
        "params": {name: {} for name, optional in schema["params"].items() if optional},
        "supports_gqa": True,
        "deterministic": True,
    }
    for dim in schema["must_constrain"]:
        if dim == "head_dim":
            kernel |= {"min_head_dim": None, "max_head_dim": None}
        else:
            kernel.setdefault("dims", {})[dim] = {}
    return kernel


def register() -> None:
    """The entry point."""
    ops, kernels = {}, {}
    for op in operations():
        schema = _native.schema(op)
        ops[op] = [_describe(op, schema)]
        kernels[kernel_id(op)] = _kernel(op, [*schema["inputs"], *schema["params"]])
    document = {
        "schema_version": "1.0",
        "backend": BACKEND,
        "backend_version": "1.0",
        "platform": "cpu",
        "ops": ops,
    }
    lz.register_backend(document, kernels)


def unregister() -> None:
    """Takes every kernel away."""
    for op in operations():
        lz.unregister_kernel(kernel_id(op))
