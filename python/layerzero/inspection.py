"""Which kernel, why, and what is there: answers as objects."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from layerzero import _native, torch_refusals
from layerzero.packing import asked_about
from layerzero.printing import aligned, visible
from layerzero.results import KeyedResult, Result, Rows, Table, cell, rows
from layerzero.tokenization.api import OPERATIONS, asked, detokenize, tokenize


@dataclass(frozen=True, slots=True)
class Reason(Result):
    """Why a kernel cannot serve a call: a stable code, its fields, and a sentence."""

    code: str
    message: str
    fields: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""
        return {"code": self.code, "message": self.message, **self.fields}


def reason(fields: str, message: str) -> Reason:
    """A reason from the engine's JSON."""
    data = json.loads(fields)
    return Reason(data.pop("code"), message, data)


def _reason(data: dict[str, Any]) -> Reason:
    rest = {k: v for k, v in data.items() if k not in ("code", "message")}
    return Reason(data["code"], data["message"], rest)


@dataclass(frozen=True, slots=True, repr=False)
class Candidate(Result):
    """One kernel that was considered."""

    kernel_id: str
    version: str
    backend: str
    accepted: bool
    rank: int | None
    score: float | None
    terms: dict[str, float] | None
    time_us: float | None
    spread_us: float | None
    time_basis: str | None
    times_floor: float | None
    transforms: list[str]
    reasons: list[Reason]
    #: Whether its time is trusted to decide.
    time_trusted: bool = False
    #: What its calls take in this process, where that has drifted from what was measured.
    live_us: float | None = None
    #: Where times decide: the fastest of those it differs from by no more than noise.
    tied_with: str | None = None
    #: What put it at its rank, where neither time nor score did.
    moved_by: str | None = None
    #: Whether it is the operation's reference, the last resort.
    reference: bool = False
    #: Memory it takes beyond arguments and results, in bytes, where it says.
    workspace_bytes: int | None = None
    #: What it takes the host and the device, where each was predicted by itself: the slower one sets the pace.
    host_us: float | None = None
    device_us: float | None = None

    @classmethod
    def _from(cls, data: dict[str, Any]) -> Candidate:
        return cls(**{**data, "reasons": [_reason(r) for r in data["reasons"]]})

    _columns: ClassVar[tuple[str, ...]] = ("rank", "kernel_id", "version", "score", "time_us", "time_basis", "reasons")


@dataclass(frozen=True, slots=True, repr=False)
class KernelInfo(Result):
    """A registered kernel."""

    _columns: ClassVar[tuple[str, ...]] = ("kernel_id", "version", "operation", "priority", "dtypes", "available")

    kernel_id: str
    version: str
    backend: str
    #: The library its backend belongs to: ``flash_attn`` for ``flash_attn_3``.
    library: str
    #: Other names it answers to in locks, rules and preferences.
    aliases: list[str]
    operation: str
    priority: int
    platforms: list[str]
    dtypes: list[str]
    reference: bool
    #: Whether it is compiled on first use.
    jit: bool
    dispatch: str
    unavailable: list[str]

    @property
    def available(self) -> bool:
        """Whether it can run on this machine, for calls it takes."""
        return not self.unavailable and self.dispatch != "described"


@dataclass(frozen=True, slots=True, repr=False)
class OperationInfo(Result):
    """An operation: its public function, and the operations its calls become."""

    _columns: ClassVar[tuple[str, ...]] = ("function", "signature", "ops")

    function: str
    signature: str
    target: str
    ops: list[str]
    doc: str


@dataclass(frozen=True, slots=True, repr=False)
class SelectionReport(Result):
    """Everything about one choice. Prints as a table; in a notebook it draws one."""

    op: str
    """The operation the call is."""
    device: str
    """The device it is about."""
    chosen: str | None
    """The kernel that would run, or ``None``."""
    basis: str
    """What the ranking went by: measured, predicted, prior, declared or locked."""
    prior: str | None
    """Where its times were measured, if that was another machine: the device and the version of torch."""
    why: str | None
    """Why that kernel, as a sentence; ``to_dict()["why"]`` has its figures."""
    ranked_by: str
    """What the order of the candidates follows: ``"time"`` or ``"score"``."""
    baseline: str | None
    """What plain torch would run."""
    times_baseline: float | None
    """How many times faster than that the chosen kernel is, where both times are known."""
    candidates: Rows[Candidate]
    """Every registered kernel of the operation: accepted ones by rank, then the others."""
    floor_us: float | None
    """The least time the work can take on this device, where its peaks are known."""
    available_bytes: int | None
    """What a workspace may take on the device beyond the headroom, in bytes, where its free memory is known."""
    pieces: int | None
    """Into how many pieces the batch is split, where no kernel can launch it as a whole."""
    torch_refusals: dict[str, list[str]]
    """Of attention on a CUDA device: which of its own implementations torch's function would not use, and why, in torch's
    words (``torch.backends.cuda.can_use_flash_attention`` and its like)."""
    _data: dict[str, Any] = field(compare=False)
    _text: str = field(compare=False)

    @classmethod
    def _from(cls, data: dict[str, Any], text: str) -> SelectionReport:
        same = ("op", "device", "chosen", "basis", "ranked_by", "baseline", "times_baseline", "floor_us")
        return cls(
            **{name: data[name] for name in (*same, "available_bytes", "pieces")},
            prior=data.get("prior"),
            why=data["why"] and data["why"]["message"],
            candidates=rows(map(Candidate._from, data["candidates"]), "candidates"),
            torch_refusals=data.get("torch_refusals", {}),
            _data=data,
            _text=text,
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as data, as ``layerzero explain --json`` prints it."""
        copy: dict[str, Any] = json.loads(json.dumps(self._data))
        return copy

    def __str__(self) -> str:
        return visible(self._text)

    def _table(self) -> Table:
        # Where times decide, a score would contradict the rank beside it.
        by_time = self.ranked_by == "time"
        above_time = ("policy", "jit")
        shown, styles = [], []
        for c in self.candidates:
            terms = {k: v for k, v in (c.terms or {}).items() if v and (not by_time or k in above_time)}
            parts = [f"{k} {v:+.0f}" for k, v in terms.items()]
            parts += [f"ties with {c.tied_with}"] if c.tied_with else []
            parts += [c.moved_by] if c.moved_by else []
            why = "; ".join(map(str, c.reasons)) or ", ".join(parts)
            time = "" if c.time_us is None else f"{c.time_us:.1f} µs"
            score = () if by_time else ("" if c.score is None else str(c.score),)
            shown.append((str(c.rank or "✗"), c.kernel_id, c.version, *score, time, why))
            styles.append("font-weight:bold" if c.rank == 1 else "" if c.accepted else "opacity:.6")
        titles = ("", "kernel", "version", *(() if by_time else ("score",)), "time", "why")
        because = f" ({self.why})" if self.why else ""
        return Table(f"{self.op} on {self.device}: {self.chosen or 'no kernel'}{because}", titles, shown, styles=styles)


@dataclass(frozen=True, slots=True, repr=False)
class Selection(KeyedResult):
    """The kernel that would serve a call."""

    op: str
    """The operation the call is."""
    kernel_id: str
    """The kernel."""
    version: str
    """Its version."""
    score: float | None
    """Its score, where scores decide."""


class _Validity(NamedTuple):
    valid: bool
    reasons: Rows[Reason]


class Validation(Result, _Validity):
    """Whether a kernel can serve a call: ``valid``, and the ``reasons`` if it cannot. As a truth value it is ``valid``, and
    it unpacks into both: ``valid, reasons = lz.validate(…)``."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return self.valid

    def _table(self) -> Table:
        return Table("valid" if self.valid else "not valid", (), [(r.code, r.message) for r in self.reasons])


def which(op: str, *args: Any, **kwargs: Any) -> Selection:
    """The kernel that would serve a call: ``lz.which("attention", q, k, v).kernel_id``.

    ``op`` is any name of an operation: a function's (``"attention"``), an alias (``"attention.causal"``) or an
    operation's own (``"norm.rms"``). The arguments are the function's; a :class:`TensorSpec` may stand for a tensor.
    """
    if op in OPERATIONS:
        call, texts, longest = asked(op, args, kwargs)
        return Selection(**call.which(len(texts), longest))
    op, args, kwargs = asked_about(op, args, kwargs)
    return Selection(**_native.which(op, *args, **kwargs))


#: What torch's attention function computes.
_TORCHS = ("attention", "attention.causal", "attention.full", "cross_attention", "attention.cross")


def explain(op: str, *args: Any, **kwargs: Any) -> SelectionReport:
    """Why that kernel: every candidate with its score, or with the reasons it is out. Arguments as for :func:`which`.

    Where the setting ``explain_enabled`` is off it raises ``ConfigurationError``.
    """
    _native.may_explain()
    if op in OPERATIONS:
        call, texts, longest = asked(op, args, kwargs)
        data, table = call.explain(len(texts), longest)
    else:
        op, args, kwargs = asked_about(op, args, kwargs)
        data, table = _native.explain(op, *args, **kwargs)
    report = json.loads(data)
    if op in _TORCHS and (refused := torch_refusals.of_call(args, kwargs)):
        report["torch_refusals"] = refused
        said = [f"  {name}: {'; '.join(reasons)}" for name, reasons in refused.items()]
        table = "\n".join([table.rstrip("\n"), "torch's function would not use", *said, ""])
    return SelectionReport._from(report, table)


def validate(kernel_id: str, *args: Any, **kwargs: Any) -> Validation:
    """Whether a kernel can serve a call, and the reasons when it cannot: ``valid, reasons = lz.validate(…)``."""
    if (op := _text_operation(kernel_id)) is not None:
        call, texts, longest = asked(op, args, kwargs)
        reasons = call.validate(kernel_id, len(texts), longest)
    else:
        kernel_id, args, kwargs = asked_about(kernel_id, args, kwargs)
        reasons = _native.validate(kernel_id, *args, **kwargs)
    return Validation(not reasons, rows(reasons, "reasons"))


def run_kernel(kernel_id: str, *args: Any, **kwargs: Any) -> Any:
    """Runs exactly this kernel, whatever the ranking; raises ``NoKernelFoundError`` with its reasons when it cannot."""
    if (op := _text_operation(kernel_id)) is not None:
        call, texts, longest = asked(op, args, kwargs)
        return call.run(texts, longest, kernel_id)
    kernel_id, args, kwargs = asked_about(kernel_id, args, kwargs)
    return _native.run_kernel(kernel_id, *args, **kwargs)


def _text_operation(kernel_id: str) -> str | None:
    """The operation on texts a kernel serves, if it is one."""
    return _native.text_operation(kernel_id)


def list_kernels(op: str | None = None) -> Rows[KernelInfo]:
    """The registered kernels, of one operation (any of its names) or of all."""
    return rows((KernelInfo(**info) for info in json.loads(_native.list_kernels(op))), "kernels")


def ops() -> Rows[OperationInfo]:
    """Every operation that can be called, with its signature and documentation."""
    found = []
    for f in _native.functions():
        doc = getattr(_native, f["name"]).__doc__ or ""
        found.append(OperationInfo(f["name"], f["signature"], f["target"], f["ops"], doc))
    for name, function in (("tokenize", tokenize), ("detokenize", detokenize)):
        arguments = inspect.signature(function).parameters.values()
        written = ", ".join(a.name if a.default is a.empty else f"{a.name}={a.default}" for a in arguments)
        found.append(
            OperationInfo(
                name, f"{name}({written})", OPERATIONS[name], [OPERATIONS[name]], inspect.getdoc(function) or ""
            )
        )
    return rows(found, "operations")


#: How a call reads its tensors, and what torch is set to: the last of each is a slow one.
TENSORS_BY = {"fields": "in place", "exchange": "through torch's exchange API", "attributes": "through Python (slow)"}
STATE_BY = {"symbols": "from its C functions", "functions": "through Python (slow)"}


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis(Result):
    """What :func:`doctor` found."""

    python: str
    layerzero: str
    devices: list[dict[str, Any]]
    backends: list[dict[str, Any]]
    kernels: int
    runnable: int
    status: dict[str, Any]
    configuration: dict[str, Any]
    """Files in force, what they warn of, and why the last reload was refused, if it was."""
    device: str = "cpu"
    """What torch calls the device that is meant where nobody says."""
    unproven: list[dict[str, Any]] = field(default_factory=list)
    """What was never run on the hardware it is for: ``backend``, ``library``, ``kernels`` (none for all), ``installed``
    (a version, or ``None``), ``why``, and ``named`` (by the setting ``backends.unproven``)."""
    compiler: str = ""
    """Who compiles in the background, and why, where that is not a process of its own."""

    def __str__(self) -> str:
        lines = [f"LayerZero {self.layerzero}, Python {self.python}", "devices"]
        lines += [f"  {i}: {d['platform']}  {d['name']}" for i, d in enumerate(self.devices)]
        if len(self.devices) > 1:
            lines.append(f"  calls that do not say are made on {self.device}")
        lines.append("backends")
        rows = []
        for b in sorted(self.backends, key=lambda b: b["unavailable"] is not None):
            known = f"version {b['version']}" + ("" if b["imported"] else ", not imported yet")
            state = b["unavailable"]["message"].partition("\n")[0] if b["unavailable"] else known
            rows.append((f"{'✗' if b['unavailable'] else '✓'} {b['name']}", state))
        lines += [f"  {line}" for line in aligned((), rows)]
        if self.unproven:
            there = [one["backend"] for one in self.unproven if one["installed"]]
            count, named = len(self.unproven), ", ".join(there) or "none"
            lines.append(f"unproven backends, off unless you name them: {count}; installed here: {named}")
        lines.append(f"kernels: {self.kernels} known, {self.runnable} can run here")
        tensors, state = self.status["tensors_by"], self.status["torch_state_by"]
        if tensors and state:
            lines.append(f"each call reads tensors {TENSORS_BY[tensors]}, and torch's state {STATE_BY[state]}")
        lines += _graph_kernels(self.status)
        if self.compiler:
            lines.append(f"kernels that are compiled on first use: {self.compiler}")
        files = self.configuration["files"]
        lines.append(f"configuration: {', '.join(files) if files else 'no files'}")
        lines += [f"  warning: {warning}" for warning in self.configuration["warnings"]]
        if refused := self.configuration["refused"]:
            lines.append("  the last reload was refused, the one before it serves:")
            lines += [f"    {line}" for line in refused.splitlines()]
        return visible("\n".join(lines))

    def _table(self) -> Table:
        first, *notes = (line for line in str(self).splitlines() if not line.startswith("  ") and line != "backends")
        known = [
            (
                "✗" if b["unavailable"] else "✓",
                b["name"],
                cell(b["version"]),
                b["unavailable"]["message"] if b["unavailable"] else "" if b["imported"] else "not imported yet",
            )
            for b in self.backends
        ]
        return Table(first, ("", "backend", "version", "state"), known, [n for n in notes if n != "devices"])


def _graph_kernels(status: Mapping[str, Any]) -> list[str]:
    """What compiled models may call of torch's, and what this torch lacks."""
    if status["graph_kernels"] is None:
        return []
    there = [name for name, why in status["graph_kernels"].items() if why is None]
    lines = [f"torch's kernels that compiled models call without Python: {', '.join(there) or 'none'}"]
    lines += [f"  not {name}: {why}" for name, why in status["graph_kernels"].items() if why is not None]
    if there and not status["graph_kernels_take_float32"]:
        lines.append(
            "  products and convolutions of float32 are left out: this torch does not say whether it rounds them"
        )
    return lines


def doctor(*, file: Any = None) -> Diagnosis:
    """Looks at the machine, the libraries and LayerZero itself, prints what it finds, and returns it."""
    from layerzero.devices import in_use

    # Which kernels can run depends on the devices, which are looked for now.
    devices = json.loads(_native.devices())
    kernels = list_kernels()
    health = json.loads(_native.health()[0])
    found = Diagnosis(
        python=sys.version.split()[0],
        layerzero=_native.__version__,
        devices=devices,
        backends=json.loads(_native.backends()),
        kernels=len(kernels),
        runnable=sum(k.available for k in kernels),
        status=_native.status(),
        configuration={
            "files": json.loads(_native.settings())["files"],
            "warnings": health["warnings"],
            "refused": health["reloads"]["last_error"],
        },
        device=in_use(),
        unproven=_unproven(),
        compiler=_compiler(),
    )
    print(found, file=file)
    return found


def _compiler() -> str:
    from layerzero.warm_up import compiler

    by = compiler()
    return str(by) if by.why or by.lost else ""


def _unproven() -> list[dict[str, Any]]:
    from layerzero import detection, loading

    allowed = loading.setting("backends.unproven")
    names = ("backend", "library", "kernels", "installed", "why")
    found = (dict(zip(names, one, strict=True)) for one in detection.unproven())
    return [{**one, "named": one["backend"] in allowed or one["library"] in allowed} for one in found]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describes a tensor to ask about, instead of making one."""

    shape: tuple[int, ...]
    dtype: Any = "float32"
    device: str = "cpu"
