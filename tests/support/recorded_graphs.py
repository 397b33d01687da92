"""CUDA graphs on a CPU: a capture notes torch's operations and their tensors, a replay runs the same operations on them.

As on a device, a capture changes no memory, and a replay runs no Python of the model and reads fixed addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _storages(values: Any) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tree_leaves(values) if isinstance(t, torch.Tensor)}


class _Recorder(TorchDispatchMode):
    """Notes operations as they run, and brings memory that they wrote to back at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, Any, Any, Any]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(value):
                    self._keep(tensor)
        results = func(*args, **kwargs)
        self.noted.append((func, args, kwargs, results))
        # A view is memory that was there before.
        self._made |= _storages(results) - _storages((args, kwargs))
        return results

    def _keep(self, tensor: torch.Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._made and address not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._before[address] = whole, whole.clone()

    def bring_back(self) -> None:
        for whole, copy in self._before.values():
            whole.copy_(copy)


class RecordedGraphs:
    """What `layerzero.graphs.Graphs` asks for."""

    def warm(self, run: Callable[[], Any], times: int) -> None:
        for _ in range(times):
            run()

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        recorder = _Recorder()
        with recorder:
            outputs = run()
        recorder.bring_back()
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                # On a device there is nothing in them yet.
                tensor.fill_(float("nan"))

        def replay() -> None:
            for func, args, kwargs, results in recorder.noted:
                _repeat(func, args, kwargs, results)

        return replay, outputs

    def allocated(self) -> int:
        return 0

    def wait(self) -> None:
        pass


def _repeat(func: Any, args: Any, kwargs: Any, results: Any) -> None:
    """Runs an operation again, and has its results where they were. Views and writes need no copy."""
    again = func(*args, **kwargs)
    for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)
