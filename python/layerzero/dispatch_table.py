"""Decisions that stay: dispatch tables and lockfiles."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from layerzero import _native, devices, fingerprints, loading, models, planned_graphs, workloads
from layerzero.documents import to_json
from layerzero.errors import ConfigurationError, InvalidCallError
from layerzero.inspection import TensorSpec
from layerzero.integrations._transformers import models as transformers_models
from layerzero.printing import visible
from layerzero.results import KeyedResult, Result, Rows, Table, rows

if TYPE_CHECKING:
    from layerzero.compiled_model import CompiledModel
    from layerzero.graph_answers import GraphStep


@dataclass(frozen=True, slots=True, repr=False)
class Mismatch(KeyedResult):
    """A decision of a lockfile, a table or a plan that cannot be kept: a stable code, its fields, and a sentence."""

    _columns: ClassVar[tuple[str, ...]] = ("entry", "call", "kernel", "code", "message")

    entry: str
    """Which one: ``call 12``, ``plans[0].ops[2]``; the document as a whole where it is empty."""
    call: str
    """The call in a few words; empty when there is none."""
    kernel: str
    """The kernel that was decided for; empty when it is about the document as a whole."""
    code: str
    """``KERNEL_GONE``, ``VERSION_CHANGED``, ``NOT_VALID``, …"""
    message: str
    """Why, as a sentence."""
    fields: dict[str, Any]
    """What else the code has."""

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""
        return {**{name: getattr(self, name) for name in self._columns}, **self.fields}


def mismatches(text: str) -> Rows[Mismatch]:
    """Decisions that cannot be kept, from the engine's JSON."""
    found = []
    for data in json.loads(text):
        own = {name: data.pop(name) for name in Mismatch._columns}
        found.append(Mismatch(**own, fields=data))
    return rows(found, "mismatches")


@dataclass(frozen=True, slots=True, repr=False)
class UndecidedCall(KeyedResult):
    """A call that a table or a plan does not decide. Its kernel is selected as usual."""

    call: str
    """The call, as JSON."""
    why: str
    """Why it is not decided."""


@dataclass(frozen=True, slots=True, repr=False)
class DispatchTable(Result):
    """Which kernel serves which calls, by buckets of sizes. Outside the buckets kernels are selected as usual."""

    model_id: str
    """What the table is of."""
    hardware_signature: str
    """The hardware it is for."""
    shape_buckets: dict[str, list[int]]
    """The upper ends of the buckets."""
    plans: list[dict[str, Any]]
    """The decisions, by bucket."""
    left_out: Rows[UndecidedCall]
    """Calls that are not in it, each with the reason."""
    device: str | None
    """What torch calls the device that was decided for."""
    _text: str

    @classmethod
    def _from(cls, text: str, left_out: Iterable[UndecidedCall], device: str | None = None) -> DispatchTable:
        data: dict[str, Any] = json.loads(text)
        same = {name: data[name] for name in ("model_id", "hardware_signature", "shape_buckets", "plans")}
        return cls(**same, left_out=rows(left_out, "left_out"), device=device, _text=text)

    def to_dict(self) -> dict[str, Any]:
        """The table as data, as its file holds it."""
        data: dict[str, Any] = json.loads(self._text)
        return data

    def save(self, path: str | Path) -> Path:
        """Writes it to a file. A process applies it if ``LAYERZERO_DISPATCH_TABLE`` or the setting ``dispatch_table`` names
        the file."""
        path = Path(path)
        _native.write_file(path, self._text)
        return path

    def load(self) -> Rows[Mismatch]:
        """Applies it in this process. Returns the entries that cannot be kept, each with the reason."""
        found = mismatches(_native.load_table(self._text, f"table of {self.model_id}"))
        fingerprints.said("table", self._text)
        return found

    def __str__(self) -> str:
        lines = [
            f"  {bucket}: {op} → {kernel}" if bucket else f"  {op} → {kernel}" for bucket, op, kernel in self._ops()
        ]
        return visible("\n".join([self._caption(), *lines]))

    def _caption(self) -> str:
        where = f" ({self.device})" if self.device else ""
        return f"{self.model_id} on {self.hardware_signature}{where}"

    def _ops(self) -> list[tuple[str, str, str]]:
        """Each decision: its bucket, its operation, its kernel."""
        found = []
        for plan in self.plans:
            bucket = ", ".join(f"{name} ≤ {end}" for name, end in plan["bucket"].items())
            found += [(bucket, op["op"], op["kernel_id"]) for op in plan["ops"]]
        return found

    def _table(self) -> Table:
        return Table(self._caption(), ("bucket", "op", "kernel"), self._ops())


def solve(
    model: Any,
    *example_inputs: Any,
    shape_buckets: Mapping[str, Sequence[int]],
    compile_jit: bool = True,
    model_id: str | None = None,
    device: Any = None,
    dtype: Any = None,
    **example_kwargs: Any,
) -> DispatchTable:
    """Decides for every call of a model, by buckets of sizes, and gives the decisions as a table.

    The model is traced, without running a kernel, at the end of every bucket: ``seq_len`` is the second size of its
    inputs, ``batch`` the first. Without example inputs ``model.dummy_inputs`` or ``model.example_inputs`` are used.
    A configuration of transformers is traced as by :func:`layerzero.tune`: a prompt and a context of each ``seq_len``.

    A model that :func:`layerzero.compile` compiled is not traced: its graph is planned at the end of every bucket, and the
    kernels of its nodes are the decisions. Without example inputs those of its first call are used. An entry of such a table is
    for all calls of an operation in its bucket; if nodes differ, the one with the most FLOPs decides. Steps that are no operation
    of LayerZero's are in ``left_out``.

    Args:
        model: the module, compiled or not; or a transformers configuration, the path of its ``config.json``, or a name (see
            :func:`layerzero.tune`).
        example_inputs: what the module is called with, at any sizes.
        dtype: what the model of a configuration computes in; float32 when not given.
        shape_buckets: the upper ends of the buckets: ``{"seq_len": [128, 512], "batch": [1, 4]}``.
        compile_jit: compile kernels that are compiled on first use for these calls first.
        model_id: what to call the table; the name of the model's class by default.
        device: what to decide for; by default where the model makes its calls, else torch's accelerator in use, else the
            CPU.
    """
    from layerzero.compiled_model import CompiledModel

    loading.load()
    args, kwargs = example_inputs, example_kwargs
    if isinstance(model, CompiledModel):
        if dtype is not None:
            kwargs = {**kwargs, "dtype": dtype}
        return _of_graph(model, args, kwargs, shape_buckets, model_id, device)
    if transformers_models.named(model):
        if args or kwargs:
            raise ConfigurationError(
                "a configuration and example inputs are given", code="BAD_REQUEST", hint="give one or the other"
            )
        calls, buckets, model_id = _of_configuration(model, shape_buckets, dtype, model_id)
        device = devices.resolve(device)
    else:
        if dtype is not None:
            # The module has a dtype; this is an argument of its own.
            kwargs = {**kwargs, "dtype": dtype}
        if not args and not kwargs:
            args, kwargs = models.examples(model)
        traced, buckets = in_buckets(model, args, kwargs, shape_buckets)
        made = [call for of_bucket in traced for call in of_bucket]
        device = devices.resolve(device, made)
        calls = list(dict.fromkeys(call.spec for call in made))
    if compile_jit:
        from layerzero.warm_up import warmup

        warmup(calls=calls, device=device)
    return decided(model_id or type(model).__name__, calls, device, buckets)


def _of_graph(
    model: CompiledModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shape_buckets: Mapping[str, Sequence[int]],
    model_id: str | None,
    device: Any,
) -> DispatchTable:
    """The kernels of a compiled model's nodes, by buckets."""
    if not args and not kwargs:
        if model._example is None:
            raise InvalidCallError(
                "nothing says what the compiled model is called with",
                code="NO_EXAMPLE_INPUTS",
                hint="pass example inputs after the model, or call it once",
            )
        args, kwargs = model._example
    where = devices.resolve(device, [devices.CPU] if device is None else ())
    if where != devices.CPU or not planned_graphs.is_on_cpu(args, kwargs):
        raise ConfigurationError(
            f"graphs run on the CPU, and the table is for {where}",
            code="BAD_DEVICE",
            hint="solve for the model itself: lz.solve(compiled.model, …)",
        )
    axes = planned_graphs.buckets_of(_axes(shape_buckets), (args, kwargs))
    text, _ = _native.solve(model_id or model._name, [], devices.number(where), axes)
    data, left_out = json.loads(text), dict[tuple[str, str], UndecidedCall]()

    def undecided(step: GraphStep, why: str) -> None:
        call = planned_graphs.undecided_call(step)
        left_out.setdefault((call, why), UndecidedCall(call, why))

    for at in planned_graphs.sizes_of(axes):
        resized = tuple(_resized(one, at) for one in args), {name: _resized(one, at) for name, one in kwargs.items()}
        ops = planned_graphs.plan_of_bucket(model, *resized, undecided)
        data["plans"].append({"bucket": at, "ops": ops, "jit_artifacts": []})
    return DispatchTable._from(json.dumps(data, indent=2) + "\n", left_out.values(), where)


def _axes(shape_buckets: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    unknown = set(shape_buckets) - {"seq_len", "batch"}
    if unknown or not shape_buckets:
        raise ConfigurationError(
            f"the buckets are {dict(shape_buckets)!r}",
            code="BAD_BUCKETS",
            hint="give the upper ends of 'seq_len', 'batch' or both",
        )
    return {name: sorted(set(ends)) for name, ends in shape_buckets.items()}


def _of_configuration(
    model: Any, shape_buckets: Mapping[str, Sequence[int]], dtype: Any, model_id: str | None
) -> tuple[list[str], dict[str, list[int]], str]:
    """The calls of a transformers configuration at the ends of the buckets, the buckets of all their sizes, and a name."""
    axes = _axes(shape_buckets)
    batch, lengths = axes.get("batch", [1]), axes.get("seq_len") or [*workloads.SEQ]
    traced = workloads.of_model(model, dtype, batch, lengths, lengths)
    lines = {size * length for size in batch for length in (1, *lengths)}
    name = (
        model if isinstance(model, str) and not model.lstrip().startswith("{") else transformers_models.name_of(model)
    )
    return traced.specs(), {**axes, "rows": sorted(lines)}, model_id or name


def in_buckets(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shape_buckets: Mapping[str, Sequence[int]]
) -> tuple[list[Sequence[models.Call]], dict[str, list[int]]]:
    """The calls a model makes at the end of each bucket, the largest last, and the buckets of all their sizes."""
    axes = _axes(shape_buckets)
    calls: list[Sequence[models.Call]] = []
    lines: set[int] = set()
    for sizes in product(*axes.values()):
        at = dict(zip(axes, sizes, strict=True))
        resized = [_resized(value, at) for value in args], {k: _resized(v, at) for k, v in kwargs.items()}
        calls.append(models.calls_of(model, *resized[0], **resized[1]))
        lines.add(at.get("seq_len", 1) * at.get("batch", 1))
    # What works on rows (norms, projections) sees all positions of all sequences at once.
    return calls, {**axes, "rows": sorted(lines)}


def decided(model_id: str, calls: Sequence[str], device: str, buckets: dict[str, list[int]]) -> DispatchTable:
    """The table of what selection decides for calls; sizes no bucket is about have those of their operation."""
    text, left_out = _native.solve(model_id, calls, _native.device_number(device), buckets)
    return DispatchTable._from(text, (UndecidedCall(**one) for one in json.loads(left_out)), device)


def _resized(value: Any, at: Mapping[str, int]) -> Any:
    shape = getattr(value, "shape", None)
    if shape is None or len(shape) < 1:
        return value
    sizes = list(shape)
    if "batch" in at:
        sizes[0] = at["batch"]
    if "seq_len" in at and len(sizes) > 1:
        sizes[1] = at["seq_len"]
    return TensorSpec(tuple(sizes), str(value.dtype).removeprefix("torch."), device=str(value.device))


def load_table(path: str | Path) -> Rows[Mismatch]:
    """Applies a dispatch table in this process. Returns the entries that cannot be kept, each with the reason."""
    found = mismatches(_native.load_table(_read(path), str(path)))
    fingerprints.said("table", _read(path))
    return found


def write_lockfile(
    path: str | Path = "layerzero.lock",
    calls: Iterable[str | Mapping[str, Any] | Result] = (),
    device: Any = None,
) -> Path:
    """Writes the decisions for these calls (all that were measured here when none are given), with their times."""
    loading.load()
    texts = [call if isinstance(call, str) else to_json(workloads.written(call)[0]) for call in calls]
    path = Path(path)
    _native.write_file(path, _native.lockfile(texts, devices.number(device)))
    return path


def load_lockfile(path: str | Path = "layerzero.lock") -> Rows[Mismatch]:
    """Applies the decisions of a lockfile in this process. Returns those that cannot be kept, each with the reason."""
    found = mismatches(_native.replay(_read(path), str(path)))
    fingerprints.said("lockfile", _read(path))
    return found


def release_pins() -> None:
    """Removes every lockfile and table that this process has loaded. Kernels are selected as usual again."""
    _native.unpin()
    fingerprints.said("unpin")


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error}", code="UNREADABLE_FILE", hint="check the path"
        ) from error
