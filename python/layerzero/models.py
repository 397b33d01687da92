"""Which calls a model makes, and which kernel each would get: seen without running a kernel.

    lz.dry_run(model, input_ids)

A forward pass runs on tensors that have shapes and no memory; weights are not copied.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from layerzero import _native, loading
from layerzero.errors import InvalidCallError, LayerZeroError
from layerzero.results import Result, Rows, Table, cell, rows

if TYPE_CHECKING:
    from layerzero.costs import Share
    from layerzero.graph_answers import PlannedGraph
    from layerzero.tracing import Obstacle, Seen


class UntraceableModelError(LayerZeroError, RuntimeError):
    """A model's forward pass cannot be run on tensors without memory. Says which line of it, and what to do."""

    def __init__(self, message: str, *, module: str = "", location: str = "", **rest: str) -> None:
        super().__init__(message, **rest)
        self.module = module
        self.location = location

    def to_dict(self) -> dict[str, Any]:
        """The same as data, with the module and the line."""
        return {**super().to_dict(), "module": self.module, "location": self.location}


@dataclass(frozen=True, slots=True, repr=False)
class Call(Result):
    """A call that a model makes from one place, and how often."""

    _columns: ClassVar[tuple[str, ...]] = ("module", "source", "call", "device", "grad", "count")

    spec: str
    """The call, written down: JSON of operation, tensors, parameters and layout."""
    device: str
    """Where it is made: ``cpu``, ``cuda:0``."""
    grad: bool
    """Whether gradients would be recorded for it."""
    module: str
    """The module it is made from; ``*`` for numbers, so that layers that are alike are one."""
    source: str
    """The function that was called: one of LayerZero's, or the one of torch's it stands in for."""
    count: int
    """How many times in one forward pass."""
    function: str
    """LayerZero's function for it."""
    arguments: Mapping[str, Any] = field(compare=False)
    """That function's arguments, tensors as outlines of them."""

    @property
    def call(self) -> dict[str, Any]:
        """The call as data."""
        data: dict[str, Any] = json.loads(self.spec)
        return data

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""
        given = {"call": self.call, "device": self.device, "grad": self.grad, "module": self.module}
        return {**given, "source": self.source, "count": self.count}

    def _table(self) -> Table:
        return Table("Call", (), [(name, cell(value)) for name, value in self.to_dict().items()])


def calls_of(model: Any, *example_inputs: Any, **example_kwargs: Any) -> Rows[Call]:
    """The calls that a model makes for these inputs: of LayerZero's functions, and of torch's that LayerZero has too.

    No kernel runs. Weights may be on any device. Weights on ``meta`` count as if they were on the device of the
    inputs. An input may be a :class:`layerzero.TensorSpec`. Without inputs ``model.dummy_inputs`` (transformers) or
    ``model.example_inputs`` are used.

    As in a real call, gradients are needed unless you call this under ``torch.no_grad()``.
    """
    return rows(traced(model, example_inputs, example_kwargs)[0], "calls")


def traced(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Call], list[tuple[str, str, str]], Share]:
    """As :func:`calls_of`, with the calls of torch's that are none of ours (function, module, why) and the share of ours."""
    from layerzero import tracing

    if not args and not kwargs:
        args, kwargs = examples(model)
    found = tracing.trace(model, args, kwargs)
    if isinstance(found, tracing.Obstacle):
        raise untraceable(found)
    calls, skipped = ours(found.seen)
    return calls, [*dict.fromkeys(found.skipped), *skipped], found.share()


def untraceable(found: Obstacle) -> UntraceableModelError:
    """The error that says where a forward pass ended."""
    said = f"{type(found.error).__name__}: {str(found.error).strip().partition(chr(10))[0]}"
    where = f" of '{found.module}'" if found.module else ""
    text = f"the forward pass{where} ends at {found.location}: {found.line!r}: {said}"
    error = UntraceableModelError(
        text, module=found.module, location=found.location, code="UNTRACEABLE_MODEL", hint=found.hint
    )
    error.__cause__ = found.error
    return error


def ours(seen: Iterable[Seen]) -> tuple[list[Call], list[tuple[str, str, str]]]:
    """The calls of operations LayerZero knows, counted, and those of torch's that are none of them: function, module, why."""
    calls, skipped = [], []
    for call in _counted(seen):
        why = None if call.source.startswith("layerzero.") else _why_not(call)
        if why is None:
            calls.append(call)
        else:
            skipped.append((call.source, call.module, why))
    return calls, skipped


def _why_not(call: Call) -> str | None:
    """Why a call of torch's is none of ours after all: torch takes some that our operations do not."""
    from layerzero import tracing

    try:
        _native.explain(call.function, **tracing.stand_ins(call.arguments))
    except InvalidCallError as error:
        return error.message
    except LayerZeroError:
        # It is one; what keeps it from being served is told when that is asked.
        return None
    return None


def examples(model: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model says it is called with."""
    for name in ("dummy_inputs", "example_inputs"):
        given = getattr(model, name, None)
        given = given() if callable(given) else given
        if given is None:
            continue
        if isinstance(given, Mapping):
            return (), dict(given)
        return (tuple(given) if isinstance(given, tuple | list) else (given,)), {}
    raise InvalidCallError(
        f"nothing says what {type(model).__name__} is called with: it has neither dummy_inputs nor example_inputs",
        code="NO_EXAMPLE_INPUTS",
        hint="pass example inputs after the model, for instance lz.TensorSpec((1, 128), 'int64')",
    )


def _counted(seen: Iterable[Seen]) -> list[Call]:
    """Calls that are alike and come from the same place in layers that are alike, as one each."""
    counts: dict[Call, int] = {}
    for one in seen:
        module = without_numbers(one.module)
        spec = json.dumps(_spec(one.function, one.arguments), separators=(",", ":"))
        call = Call(spec, one.device, one.grad, module, one.source, 1, one.function, one.arguments)
        counts[call] = counts.get(call, 0) + one.times
    return [replace(call, count=count) for call, count in counts.items()]


def without_numbers(module: str) -> str:
    """The name of a module with ``*`` for numbers: layers that are alike have the same."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


@cache
def _functions() -> dict[str, dict[str, Any]]:
    return {function["name"]: function for function in _native.functions()}


def _spec(function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call of one of LayerZero's functions as it is written down."""
    about = _functions()[function]
    declared = {argument["name"]: argument for argument in about["args"]}
    tensors: dict[str, Any] = {}
    params: dict[str, Any] = {}
    for name, value in arguments.items():
        kind = declared[name]["kind"] if name in declared else "inner"
        if kind == "input":
            tensors[name] = value.to_spec()
        elif kind == "param" and name != "seed" and value != declared[name]["default"]:
            params[name] = value if isinstance(value, bool | int | float) else str(value).removeprefix("torch.")
    if (window := arguments.get("window")) is not None:
        left, *right = [window] if isinstance(window, int) else window
        params |= {"window_left": left} | ({"window_right": right[0]} if right else {})
    first = next(iter(tensors.values()))
    if (packed := arguments.get("format")) is not None:
        # Two values to a byte.
        first.update(dtype=packed, shape=[*first["shape"][:-1], first["shape"][-1] * 2])
        first.pop("strides", None)
    if (sizes := arguments.get("normalized_shape")) is not None and len(sizes) > 1:
        # A norm over several dimensions is one over all of their elements in a row.
        for tensor in tensors.values():
            tensor["shape"] = [*tensor["shape"][: -len(sizes)], math.prod(sizes)]
            tensor.pop("strides", None)
    spec = {"op": about["target"], "tensors": dict(sorted(tensors.items()))}
    spec |= {"params": dict(sorted(params.items()))} if params else {}
    return spec | ({"layout": arguments["layout"]} if arguments.get("layout") else {})


@dataclass(frozen=True, slots=True, repr=False)
class PlannedCall(Result):
    """A call of a model, and the kernel it would get."""

    call: Call
    op: str
    """The operation it is."""
    shape: str
    """Its sizes by name."""
    module: str
    """Where in the model it is made."""
    count: int
    """How many times in one forward pass."""
    kernel_id: str | None
    """The kernel, or ``None``."""
    basis: str | None
    """What the choice went by: measured, predicted, declared or locked."""
    time_us: float | None
    """How long one call takes, where that is known."""
    baseline: str | None
    """What plain torch would run."""
    baseline_us: float | None
    """How long that takes, where it is known."""
    reason: str | None
    """Why no kernel can serve it, when none can."""


_COLUMNS = ("module", "op", "shape", "count", "kernel", "basis", "time", "torch")


class SkippedCall(NamedTuple):
    """A call of a torch function that looks like an operation of LayerZero, but is not one."""

    function: str
    """The function that was called."""
    module: str
    """The module it is made from."""
    why: str
    """Why it is left to torch."""


@dataclass(frozen=True, slots=True, repr=False)
class DryRun(Result):
    """What a model would run: its calls, each with the kernel it would get, and the graph of it. Prints as a table."""

    calls: Rows[PlannedCall]
    """Every call that the model itself makes, in the order of the first ones. A compiled model makes none of them."""
    skipped: list[SkippedCall]
    """Calls of torch's that look like one of LayerZero's and are none."""
    graph: PlannedGraph | None = None
    """What :func:`layerzero.compile` makes of the model on a CPU: the kernel of each node, and the memory."""
    no_graph: str = ""
    """Why there is no graph."""

    def _table(self) -> Table:
        if self.graph is not None and not self.calls:
            return self.graph._table()
        return Table("", _COLUMNS, [_row(call) for call in self.calls], self._remarks(), ("count", "time", "torch"))

    def _remarks(self) -> list[str]:
        lines = [f"{c.module or 'the model'}: {c.op} has no kernel: {c.reason}" for c in self.calls if c.reason]
        timed = [call for call in self.calls if call.time_us is not None and call.baseline_us is not None]
        if timed:
            ours, torchs = (sum(getattr(c, of) * c.count for c in timed) for of in ("time_us", "baseline_us"))
            lines.append(f"{ours:.1f} µs where torch takes {torchs:.1f} µs, over the calls of which both are known")
        if self.graph is not None:
            lines.append(f"compiled by lz.compile: {'; '.join(self.graph.report._notes())}. Print .graph for its steps")
        return lines + [f"{s.module or 'the model'}: {s.function} is left to torch: {s.why}" for s in self.skipped]

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""
        skipped = [skipped._asdict() for skipped in self.skipped]
        graph = None if self.graph is None else self.graph.to_dict()
        found = {"schema_version": "1.0", **self.calls.to_dict(), "skipped": skipped}
        return {**found, "graph": graph, "no_graph": self.no_graph}


def _row(call: PlannedCall) -> tuple[str, ...]:
    def time(us: float | None) -> str:
        return "" if us is None else f"{us:.1f} µs"

    kernel, basis = call.kernel_id or "none", call.basis or ""
    return call.module, call.op, call.shape, str(call.count), kernel, basis, time(call.time_us), time(call.baseline_us)


def dry_run(model: Any, *args: Any, **kwargs: Any) -> DryRun:
    """Which kernel each call of a model would get, without running the model. Inputs as for :func:`calls_of`.

    For a compiled model, ``graph`` has the kernel of each node of its graph, the other candidates, the memory and the calls
    that stay torch's. So it has for a module in evaluation mode on the CPU, as :func:`layerzero.compile` would make its
    graph; ``no_graph`` says why there is none. Of models of more than 2 GiB a graph is made only if they are compiled:
    ``lz.dry_run(lz.compile(model), x)``.
    """
    from layerzero import planned_graphs
    from layerzero.compiled_model import CompiledModel

    loading.load()
    if isinstance(model, CompiledModel):
        if model.model is None or (model._decided is None and planned_graphs.is_on_cpu(args, kwargs)):
            return DryRun(rows((), "calls"), [], planned_graphs.of_compiled(model, args, kwargs))
        model = model.model
    if not args and not kwargs:
        args, kwargs = examples(model)
    calls, skipped, _ = traced(model, args, kwargs)
    graph, why = planned_graphs.of_module(model, args, kwargs)
    return DryRun(rows(map(_planned, calls), "calls"), [SkippedCall(*one) for one in skipped], graph, why)


def _planned(call: Call) -> PlannedCall:
    from layerzero import tracing

    try:
        data = json.loads(_native.explain(call.function, **tracing.stand_ins(call.arguments))[0])
    except LayerZeroError as error:
        data = {"op": json.loads(call.spec)["op"], "dims": {}, "chosen": None, "basis": None, "candidates": []}
        why: str | None = error.message
    else:
        rejected = (f"{c['kernel_id']}: {c['reasons'][0]['message']}" for c in data["candidates"] if c["reasons"])
        why = None if data["chosen"] else "; ".join(rejected) or "none is registered"
    times = {candidate["kernel_id"]: candidate["time_us"] for candidate in reversed(data["candidates"])}
    return PlannedCall(
        call=call,
        op=data["op"],
        shape=" ".join(f"{name}={size}" for name, size in data["dims"].items()),
        module=call.module,
        count=call.count,
        kernel_id=data["chosen"],
        basis=data["basis"],
        time_us=times.get(data["chosen"]),
        baseline=data.get("baseline"),
        baseline_us=times.get(data.get("baseline")),
        reason=why,
    )


#: What a configuration says of where a model came from and how it is run, and not of what it is.
_VOLATILE = frozenset(["_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "use_cache"])


def model_hash(model: Any) -> str:
    """A hash that differs between models whose calls differ: of the configuration if the model has one (transformers),
    else of its structure, with the shapes and dtypes of its parameters. The values of weights are not part of it."""
    config: Any = getattr(model, "config", None)
    data = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
    if isinstance(data, Mapping):
        said: Any = {str(key): value for key, value in data.items() if key not in _VOLATILE}
    elif callable(getattr(model, "named_modules", None)):
        modules = [(name, type(module).__qualname__, module.extra_repr()) for name, module in model.named_modules()]
        tensors = [*model.named_parameters(), *model.named_buffers()]
        said = [modules, [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]]
    else:
        raise InvalidCallError(
            f"{type(model).__name__} has neither a configuration nor modules",
            code="NOT_A_MODEL",
            hint="pass a torch.nn.Module, or an object whose 'config' is a dict",
        )
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
