"""The steps of a graph for exact sizes, and the order in which memory is written and given back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerzero.device_graphs import appends, fusions
from layerzero.device_graphs.nodes import Node, Step, Work
from layerzero.device_graphs.runners.indexing import from_front

if TYPE_CHECKING:
    from layerzero import _native
    from layerzero.export.host_calls import HostCalls

#: Operations that make a copy of an input with parts replaced.
_REPLACES = frozenset(["index_copy", "index_put"])
_CREATES = frozenset(["iota", "full"])


@dataclass(frozen=True)
class _Planned:
    """A step, by the places of its values."""

    step: Step
    reads: tuple[int | None, ...]
    makes: tuple[int, ...]
    #: Values that nothing reads afterwards.
    dies: tuple[int, ...]


class Program:
    """A graph for inputs of exact sizes, as calls of the device's kernels."""

    def __init__(
        self,
        graph: _native.DeviceGraph,
        sizes: Sequence[tuple[str, Sequence[int]]],
        device: torch.device,
        host: HostCalls | None,
        constants: Callable[[str], Tensor],
        joins: Callable[[Sequence[str]], bool],
    ) -> None:
        self.device = device
        nodes = [Node.of(row) for row in graph.nodes(sizes)]
        self._names = {name: at for at, name in enumerate(graph.inputs)}
        self._count = len(self._names)
        self._known: list[tuple[int, Tensor]] = []
        made = {node.output for node in nodes}
        known: dict[str, Tensor] = {}
        read = [name for node in nodes for name in node.inputs if name is not None]
        for name in dict.fromkeys([*read, *graph.outputs, *(new for _, new in graph.updates)]):
            if name not in made and name not in self._names:
                known[name] = constants(name)
                self._known.append((self._place(name), known[name]))
        by_name = {node.output: node for node in nodes}

        def number(name: str) -> int:
            made = by_name.get(name)
            return int(made.start) if made is not None and made.op == "iota" else int(graph.constant(name).item())

        def same(name: str) -> object:
            """Equal for names of the same value: tables of each layer."""
            return known[name].data_ptr() if name in known else name

        shapes = {name: tuple(size) for name, (_, size) in zip(graph.inputs, sizes, strict=True)}
        shapes |= {name: tuple(tensor.shape) for name, tensor in known.items()}
        self._shapes = {**shapes, **{node.output: node.shape for node in nodes}}
        kept = [*graph.outputs, *(new for _, new in graph.updates)]
        steps = fusions.Fusing(nodes, shapes, kept, host, number, joins, same).steps()
        updates, steps = _in_place(graph.updates, steps, graph.outputs)
        steps = appends.joined(steps, self._shapes)
        steps = [_creating(step, device) if step.last.op in _CREATES else step for step in steps]
        for step in steps:
            for name in step.makes:
                self._place(name)
        self.steps = steps
        self.outputs = [self._names[name] for name in graph.outputs]
        self._updates = [(self._names[old], self._names[new]) for old, new in updates]
        self._planned = self._plan(steps)

    def _place(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def _plan(self, steps: Sequence[Step]) -> list[_Planned]:
        kept = {*range(self._count), *(at for at, _ in self._known), *self.outputs, *(at for _, at in self._updates)}
        found: list[_Planned] = []
        for step in reversed(steps):
            reads = tuple(None if name is None else self._names[name] for name in step.reads)
            makes = tuple(self._names[name] for name in step.makes)
            last = {at for at in (*reads, *makes) if at is not None} - kept
            kept |= last
            found.append(_Planned(step, reads, makes, tuple(last)))
        return found[::-1]

    def values(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The places of all values, those that are known before a run filled."""
        values: list[Any] = [None] * len(self._names)
        values[: self._count] = inputs
        for at, tensor in self._known:
            values[at] = tensor
        return values

    def run_steps(self, values: list[Any], first: int = 0, end: int | None = None) -> None:
        """Runs some steps."""
        for at in range(first, len(self.steps) if end is None else end):
            self.put(values, at, self.ran(values, at))

    def ran(self, values: Sequence[Any], at: int) -> Sequence[Tensor]:
        """What a step gives."""
        planned = self._planned[at]
        return planned.step([None if place is None else values[place] for place in planned.reads])

    def put(self, values: list[Any], at: int, found: Sequence[Tensor]) -> None:
        """Puts what a step gives to its places, and forgets what nothing reads afterwards."""
        planned = self._planned[at]
        for place, one in zip(planned.makes, found, strict=True):
            values[place] = one
        for place in planned.dies:
            values[place] = None

    def update(self, values: list[Any]) -> None:
        """Writes the new contents of inputs that the model changes. Results keep the contents from before."""
        if not self._updates:
            return
        targets = [values[old] for old, _ in self._updates]
        written = set(map(_memory, targets))
        for at in self.outputs:
            if _memory(values[at]) in written:
                values[at] = values[at].clone()
        # All of what is new is there before any of it is written: two inputs may exchange their contents.
        fresh = [values[new] for _, new in self._updates]
        fresh = [one.clone() if _memory(one) in written else one for one in fresh]
        for target, one in zip(targets, fresh, strict=True):
            target.copy_(one)

    def run(self, inputs: Sequence[Tensor], after: Callable[[], object] | None = None) -> list[Tensor]:
        """Runs it, and calls `after` behind each step. Results have memory of their own, unless they are views of inputs that are not
        written."""
        values = self.values(inputs)
        for at in range(len(self.steps)):
            self.run_steps(values, at, at + 1)
            if after is not None:
                after()
        self.update(values)
        # What is known before stays as it is, whatever the caller writes to a result; and no result keeps a larger one alive.
        known = {_memory(tensor) for _, tensor in self._known}
        results = [values[at] for at in self.outputs]
        part = [_memory(one) in known or one.untyped_storage().nbytes() != one.nbytes for one in results]
        return [one.clone() if copied else one for one, copied in zip(results, part, strict=True)]

    def signature(self, step: Step) -> str:
        """What two steps share that make the same calls."""
        shapes = [None if name is None else self._shapes.get(name) for name in step.reads]
        nodes = [(node.op, sorted(node.attributes.items()), node.dtype, node.shape) for node in step.nodes]
        return repr((step.work.kernel, shapes, nodes))

    def peak_bytes(self) -> int:
        """Bytes of everything between inputs and results, at the step with the most of them. Views take none."""
        nodes = [node for step in self.steps for node in step.nodes]
        size = {node.output: math.prod(node.shape) * node.dtype.itemsize for node in nodes}
        names = {at: name for name, at in self._names.items()}
        root: dict[int, int] = {}
        #: How many values there are of each memory.
        users: Counter[int] = Counter()
        most = now = 0
        for planned in self._planned:
            for at in planned.makes:
                work = planned.step.work
                of = planned.reads[0] if work.view or work.in_place else None
                root[at] = at if of is None else root.get(of, of)
                users[root[at]] += 1
                now += size[names[at]] if root[at] == at else 0
            most = max(most, now)
            for at in planned.dies:
                of = root.get(at, at)
                users[of] -= 1
                if users[of] == 0:
                    now -= size[names[of]]
        return most


def _creating(step: Step, device: torch.device) -> Step:
    """A step that makes something out of nothing, on a device."""
    run = step.work.run
    return replace(step, work=replace(step.work, run=lambda: run(device)))


def _in_place(
    updates: Iterable[tuple[str, str]], steps: Sequence[Step], outputs: Iterable[str]
) -> tuple[list[tuple[str, str]], list[Step]]:
    """Steps that write an input which is updated with what they make, in the input's own memory, where nothing else reads
    the input: a cache is not copied for each token."""
    left, changed, given = [], list(steps), set(outputs)
    for old, new in updates:
        at = next((i for i, step in enumerate(changed) if new in step.makes), None)
        step = None if at is None else changed[at]
        alone = (
            step is not None
            and step.last.op in _REPLACES
            and step.reads[0] == old
            and old not in step.reads[1:]
            and not {old, new} & given
            # Another step might give a view of it, which would show what is written.
            and sum(old in other.reads for other in changed) == 1
        )
        if not alone:
            left.append((old, new))
            continue
        assert step is not None and at is not None
        changed[at] = replace(step, work=_written(step))
    return left, changed


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(step: Step) -> Work:
    node = step.last
    if node.op == "index_copy":
        axis = node.axis
        return replace(
            step.work,
            run=lambda x, at, source: x.index_copy_(axis, from_front(at, x.shape[axis]), source),
            in_place=True,
        )
    add = node.attributes.get("accumulate", False)
    return replace(
        step.work,
        run=lambda x, source, *at: x.index_put_([one.long() for one in at], source, accumulate=add),
        in_place=True,
    )
