"""``lz.decide``: a model with the kernels of its calls decided once.

    plan = lz.decide(model, input_ids)
    out = plan(input_ids)

A plan is called as the model is. The decisions hold for the calls the model makes inside of it, and for no others.
"""

from __future__ import annotations

import copy
import functools
import json
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerzero import _native, control, devices, dispatch_table, loading, models
from layerzero.coroutines import carried
from layerzero.dispatch_table import DispatchTable, Mismatch, UndecidedCall
from layerzero.errors import ConfigurationError, InvalidCallError, warn
from layerzero.lifecycle import open_in_forks
from layerzero.results import Result, Rows, Table, call_text, rows

#: Contexts around a plan whose overlays it keeps.
_FRAMES = 64


@dataclass(frozen=True, slots=True, repr=False)
class BakedCall(Result):
    """A kind of call, and the kernel that was decided for it."""

    op: str
    """The operation."""
    call: dict[str, Any]
    """The call it was decided for, as it is written down."""
    bucket: dict[str, int]
    """The upper ends of its sizes, where the plan was made with buckets; else those its operation has count."""
    kernel_id: str
    """The kernel."""
    version: str | None
    """The kernel's version."""
    basis: str | None
    """What the decision went by: measured, predicted, prior, declared, locked, or a rule."""
    time_us: float | None
    """How long one call takes, where that was known."""
    graph: bool
    """Whether it is only for calls under CUDA graph capture."""


class Plan:
    """A model whose calls are decided. You call it as you call the model. Prints as a table.

    A plan has all attributes of its model. The model's methods follow the plan too: ``plan.generate(…)`` does, and
    ``plan.eval()`` returns the plan. To set an attribute, set it on ``plan.model``. The model itself runs, with its own
    parameters and in its own mode.

    Only calls that the model makes on the calling thread follow the plan; those of threads that the model starts do not.
    Generators and coroutines of the model follow it at each step. The backward pass does not follow it.
    """

    __slots__ = ("__weakref__", "_learns", "_left_out", "_lock", "_now", "_torch_calls", "_untraced", "model")

    #: The model.
    model: Any

    def __init__(
        self,
        model: Any,
        table: str,
        *,
        learns: bool = False,
        left_out: Iterable[UndecidedCall] = (),
        torch_calls: Mapping[str, int] | None = None,
        untraced: str = "",
    ) -> None:
        self.model = model
        self._lock = open_in_forks(threading.Lock())
        self._learns = learns
        self._left_out, self._torch_calls, self._untraced = list(left_out), dict(torch_calls or {}), untraced
        baked = _native.Plan(table, json.loads(table)["model_id"], learns)
        #: The decisions, and what calls made inside stand in, by the overlay around.
        self._now: tuple[_native.Plan, dict[int, control.Frame]] = (baked, {})

    @classmethod
    def load(cls, path: str | Path, model: Any) -> Plan:
        """A plan that :meth:`save` wrote, or a table of :func:`layerzero.solve`, for a model.

        A table for other hardware, or of other capabilities of its libraries, is refused. Of the others
        :attr:`mismatches` says which entries cannot be kept.
        """
        loading.load()
        _callable(model)
        text = dispatch_table._read(path)
        try:
            json.loads(text)["model_id"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{path} is no plan: {error!r}", code="BAD_TABLE", hint="make it anew with lz.decide(…).save(…)"
            ) from error
        return cls(model, text)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model with its decisions in force."""
        blocks = control.OpenBlocks()
        return carried(self._run(blocks, self.model, *args, **kwargs), functools.partial(self._run, blocks))

    def _run(self, blocks: control.OpenBlocks, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs something inside: all of a call, or its next step, in the blocks the steps before have left open."""
        around = control.frames()
        frame = self._frame(around)
        blocks.enter((frame, *around))
        try:
            result = work(*args, **kwargs)
        finally:
            blocks.keep()
            control.stand_in(around)
        if self._learns:
            self._learn(frame)
        return result

    def _frame(self, around: tuple[control.Frame, ...]) -> control.Frame:
        """What calls made inside stand in."""
        baked, frames = self._now
        outer = around[0].number if around else 0
        frame = frames.get(outer)
        if frame is None:
            if len(frames) >= _FRAMES:
                frames.pop(next(iter(frames)), None)
            frame = frames[outer] = control.Frame({}, baked, control.overlay({}, baked, around))
        return frame

    def _learn(self, frame: control.Frame) -> None:
        """Decides the calls that were made inside for the first time. They have their results whatever comes of it."""
        try:
            with self._lock:
                learned = frame.plan and frame.plan.learned(self._now[0])
                if learned is not None:
                    self._now = (learned, {})
        except Exception as error:  # noqa: BLE001 - told below
            warn(
                f"the plan of {self.table.model_id} could not decide the calls made inside for the first time: {error}"
            )

    @contextmanager
    def inside(self) -> Iterator[None]:
        """``with plan.inside():`` applies the decisions to the calls made there: to ask :func:`layerzero.explain` about
        them, or to run parts of the model."""
        around = control.frames()
        frame = self._frame(around)
        entered = control.Frame({}, *frame[1:])
        control.stand_in((entered, *around))
        try:
            yield
        finally:
            control.leave(entered, around)
        if self._learns:
            self._learn(frame)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in Plan.__slots__:
            raise AttributeError(f"'Plan' object has no attribute '{name}'")
        value = getattr(self.model, name)
        if not isinstance(value, types.MethodType) or value.__self__ is not self.model:
            return value

        @functools.wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            blocks = control.OpenBlocks()
            result = carried(self._run(blocks, value, *args, **kwargs), functools.partial(self._run, blocks))
            return self if result is self.model else result

        return method

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        """A plan of a copy of the model with the same decisions; each learns for itself from here on."""
        # Known before the model is copied, which may hold its plan.
        memo[id(self)] = copied = Plan.__new__(Plan)
        Plan.__init__(
            copied,
            copy.deepcopy(self.model, memo),
            self._now[0].table(),
            learns=self._learns,
            left_out=self._left_out,
            torch_calls=self._torch_calls,
            untraced=self._untraced,
        )
        return copied

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.model)})

    @property
    def table(self) -> DispatchTable:
        """The decisions as a dispatch table."""
        return DispatchTable._from(self._now[0].table(), self._left_out)

    @property
    def decisions(self) -> Rows[BakedCall]:
        """What was decided, call by call."""
        found = (
            BakedCall(
                op=op["op"],
                call=op["call"],
                bucket=plan["bucket"],
                kernel_id=op["kernel_id"],
                version=op.get("version"),
                basis=op.get("basis"),
                time_us=op.get("time_us"),
                graph=op.get("graph", False),
            )
            for plan in self.table.plans
            for op in plan["ops"]
            if op.get("call") is not None
        )
        return rows(found, "decisions")

    @property
    def left_out(self) -> Rows[UndecidedCall]:
        """Calls it does not decide, each with the reason. Kernels are selected for them as usual."""
        return rows(self._left_out, "left_out")

    @property
    def torch_calls(self) -> dict[str, int]:
        """Calls of torch's own functions that LayerZero could serve, and how many. torch serves them."""
        return dict(self._torch_calls)

    @property
    def mismatches(self) -> Rows[Mismatch]:
        """The decisions that do not apply now, each with the reason."""
        return dispatch_table.mismatches(self._now[0].mismatches())

    def save(self, path: str | Path) -> Path:
        """Writes the decisions to a file. :meth:`load` reads it; ``lz.load_table`` applies it to a whole process."""
        return self.table.save(path)

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""
        table = self.table
        return {
            "schema_version": "1.0",
            "model_id": table.model_id,
            "hardware_signature": table.hardware_signature,
            "shape_buckets": table.shape_buckets,
            "learns": self._learns,
            "torch_calls": self.torch_calls,
            **self.decisions.to_dict(),
            **self.left_out.to_dict(),
            **self.mismatches.to_dict(),
        }

    def __repr__(self) -> str:
        return f"<Plan of {self.table.model_id}: {len(self.decisions)} decisions>"

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        table, decisions = self.table, self.decisions
        head, remarks = f"plan of {table.model_id} on {table.hardware_signature}", self._remarks()
        if not decisions:
            return Table(head, (), (), ["nothing is decided", *remarks])
        return Table(head, _COLUMNS, [_row(one) for one in decisions], remarks, ("time",))

    def _remarks(self) -> list[str]:
        lines = [f"its dummy inputs were not followed: {self._untraced}"] if self._untraced else []
        if self._learns:
            lines.append("a kind of call that is not listed is decided when it is first made inside")
        for name, count in self._torch_calls.items():
            lines.append(f"{name} is called {count} time{'s' if count > 1 else ''} and stays torch's")
        lines += [f"not decided: {call_text(json.loads(one.call))}: {one.why}" for one in self._left_out]
        lines += [f"not in force: {one.kernel} {one.message}".replace("  ", " ") for one in self.mismatches]
        return lines


def stay_out_of_graphs() -> None:
    """Has torch's compiler leave what a plan does around its model to Python, and go on with the model."""
    import torch

    reason = "a plan of lz.decide cannot be part of a full graph: compile its model, lz.decide(torch.compile(model))"
    Plan._run = torch.compiler.disable(Plan._run, recursive=False, reason=reason)  # type: ignore[method-assign,no-untyped-call]


_COLUMNS = ("op", "call", "bucket", "kernel", "basis", "time")


def _row(one: BakedCall) -> tuple[str, ...]:
    bucket = " ".join(f"{name}≤{end}" for name, end in one.bucket.items())
    op = f"{one.op} (captured)" if one.graph else one.op
    time = "" if one.time_us is None else f"{one.time_us:.1f} µs"
    return op, call_text(one.call, named=False), bucket, one.kernel_id, one.basis or "", time


def decide(
    model: Any,
    *example_inputs: Any,
    shape_buckets: Mapping[str, Sequence[int]] | None = None,
    model_id: str | None = None,
    **example_kwargs: Any,
) -> Plan:
    """A model with the kernels of its calls decided once: ``plan = lz.decide(model, inputs)``, then ``plan(inputs)``.

    The model is traced on the inputs, without running a kernel. For every call of a LayerZero function the kernel that
    selection would choose now is decided; later measurements do not change it. Calls of torch's own functions stay
    torch's (``plan.torch_calls``). A decision is for the sizes in the same bucket; outside the buckets kernels are
    selected as usual. Denials, locks, overrides and rollouts take precedence over a plan. A decided kernel that cannot
    serve a call, or whose circuit is open, is not used for it.

    Without inputs the plan learns: every kind of call is decided when it is first made, and stays decided. If the model
    has ``dummy_inputs`` or ``example_inputs``, their calls are decided at once.

    Args:
        model: a module, or anything else that can be called.
        example_inputs: what it is called with; tensors, or :class:`layerzero.TensorSpec`.
        shape_buckets: the upper ends of buckets of sizes, as for :func:`layerzero.solve`; those of the operations when
            not given.
        model_id: what to call the plan; the name of the model's class by default.
    """
    loading.load()
    _callable(model)
    itself = getattr(model, "_orig_mod", model)
    name = model_id or str(getattr(itself, "__name__", type(itself).__name__))
    args, kwargs = example_inputs, example_kwargs
    learns, untraced = not args and not kwargs and shape_buckets is None, ""
    traced: list[Sequence[models.Call]] = []
    buckets: dict[str, list[int]] = {}
    if learns:
        try:
            traced = [models.calls_of(model)]
        except models.UntraceableModelError as error:
            untraced = error.message
        except InvalidCallError as error:
            if error.code != "NO_EXAMPLE_INPUTS":
                raise
    elif shape_buckets is None:
        traced = [models.calls_of(model, *args, **kwargs)]
    else:
        if not args and not kwargs:
            args, kwargs = models.examples(model)
        traced, buckets = dispatch_table.in_buckets(model, args, kwargs, shape_buckets)
    ours = [call for of_bucket in traced for call in of_bucket if call.source.startswith("layerzero.")]
    torchs: Counter[str] = Counter()
    for call in traced[-1] if traced else ():
        if not call.source.startswith("layerzero."):
            torchs[call.source] += call.count
    table = _decided(name, ours, buckets)
    return Plan(model, table._text, learns=learns, left_out=table.left_out, torch_calls=torchs, untraced=untraced)


def _decided(name: str, calls: list[models.Call], buckets: dict[str, list[int]]) -> DispatchTable:
    """A table is for one kind of device: the one most calls are made on."""
    kinds = Counter(call.device.partition(":")[0] for call in calls)
    here = [call for call in calls if call.device.partition(":")[0] == kinds.most_common(1)[0][0]]
    if here:
        from layerzero.warm_up import warmup

        warmup(calls=here)
    device = devices.resolve(of=here)
    table = dispatch_table.decided(name, list(dict.fromkeys(call.spec for call in here)), device, buckets)
    elsewhere = {call.spec: call.device for call in calls if call not in here}
    why = "it is made on {}; the plan is for {}"
    others = (UndecidedCall(spec, why.format(on, device)) for spec, on in elsewhere.items())
    return replace(table, left_out=rows([*table.left_out, *others], "left_out"))


def _callable(model: Any) -> None:
    if not callable(model):
        raise InvalidCallError(
            f"{type(model).__name__} cannot be called",
            code="NOT_A_MODEL",
            hint="pass a torch.nn.Module or a function",
        )
