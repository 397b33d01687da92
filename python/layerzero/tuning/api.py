"""``lz.tune`` and ``lz.regret``: measure here, remember, and see how good the choices are."""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from layerzero import _native, devices, fingerprints, workloads
from layerzero.control import setting
from layerzero.documents import to_json
from layerzero.errors import ConfigurationError
from layerzero.inspection import SelectionReport
from layerzero.integrations import transformers_models
from layerzero.lifecycle import waited_for
from layerzero.models import Call
from layerzero.printing import aligned, show_status, visible
from layerzero.tuning import forward
from layerzero.tuning.forward import Forward
from layerzero.workloads import Traced

_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0}


class TuneReport:
    """What tuning found out: ``device``, ``tuned`` (one entry per call), ``left``, ``impossible``, ``known``, ``spent_s``;
    of a model also ``forward`` and ``left_out``."""

    def __init__(self, document: dict[str, Any], forward: Forward | None = None, left_out: Sequence[str] = ()) -> None:
        self._document = document
        #: Of a model: how long its calls take before and after.
        self.forward = forward
        #: Of a model: what is not among the calls, and why.
        self.left_out = list(left_out)
        #: What torch calls the device it was measured on.
        self.device: str = document["device"]
        self.tuned: list[dict[str, Any]] = document["tuned"]
        #: Calls the budget did not suffice for.
        self.left: list[dict[str, Any]] = document["left"]
        #: Calls that could not be measured, each with why.
        self.impossible: list[list[Any]] = document["impossible"]
        #: How many calls were measured before, well enough.
        self.known: int = document["known"]
        #: Seconds spent.
        self.spent_s: float = document["spent_s"]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        if self.forward is None:
            return self._document
        return {**self._document, "forward": self.forward.to_dict(), "left_out": self.left_out}

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("call", "chosen", "runner-up", "×baseline")]
        for t in self.tuned:
            times = f"{t['times_baseline']:.2f}" if t["times_baseline"] else "–"
            rows.append((t["label"], t["chosen"] or "–", t["runner_up"] or "–", times))
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        lines = aligned(rows[0], rows[1:])
        out = [f"out: {kernel}: {why}" for t in self.tuned for kernel, why in t["out"]]
        rest = [f"not measured: {call['op']}: {why}" for call, why in self.impossible]
        rest += [f"left out: {text}" for text in self.left_out]
        last = [f"{len(self.tuned)} measured on {self.device} in {self.spent_s:.1f} s, {self.known} known"]
        last += [str(self.forward)] if self.forward is not None else []
        return visible("\n".join([*lines, *out, *rest, *last]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *body = self._rows()

        def cells(row: tuple[str, ...], tag: str) -> str:
            return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)

        lines = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in body)
        last = f"<p>{html.escape(str(self.forward))}</p>" if self.forward is not None else ""
        return f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{lines}</tbody></table>{last}"


class Workload(list[dict[str, Any]]):
    """Calls as they are written down, how often each is made, and the device they would be made on."""

    def __init__(self, calls: Iterable[dict[str, Any]], device: str, traced: Traced | None = None) -> None:
        super().__init__(calls)
        #: What torch calls the device.
        self.device = device
        #: How often each call is made, in the same order; once where no model was traced.
        self.counts: list[int] = traced.counts() if traced is not None else [1] * len(self)
        #: Of a model: which share of its FLOPs and of the bytes it moves these calls are.
        self.coverage: dict[str, float] | None = traced.coverage() if traced is not None else None
        #: Of a model: what is not among the calls, and why.
        self.left_out: list[str] = list(traced.left_out) if traced is not None else []


def seconds(budget: float | str) -> float:
    """A time to spend in seconds: a number, or text such as ``"60s"`` or ``"2m"``."""
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", budget)
        if match is None or match[2] not in _UNITS:
            raise _bad(f"the budget is {budget!r}", "write it like '60s', '2m' or '500ms', or as a number of seconds")
        budget = float(match[1]) * _UNITS[match[2]]
    if not (budget > 0 and budget < float("inf")):
        raise _bad(f"the budget is {budget!r}", "give a time above zero, such as '60s'")
    return float(budget)


def _bad(text: str, hint: str) -> ConfigurationError:
    return ConfigurationError(text, code="BAD_REQUEST", hint=hint)


@waited_for
def tune(
    operation: Any = None,
    *inputs: Any,
    dtype: Any = None,
    shapes: Sequence[Sequence[int]] | None = None,
    calls: Iterable[str | Mapping[str, Any] | Call] | None = None,
    model: Any = None,
    batch: Sequence[int] | int = (),
    seq: Sequence[int] | int = (),
    context: Sequence[int] | int = (),
    known: bool = False,
    budget: float | str = "60s",
    samples: int | None = None,
    device: Any = None,
    graph: bool = False,
    layout: str | None = None,
    params: Mapping[str, Any] | None = None,
    force: bool = False,
    progress: bool | None = None,
    **dims: Any,
) -> TuneReport:
    """Measures every kernel that can serve these calls, side by side, and goes by it from then on.

    Each kernel is first compared with the reference: one that is wrong is never timed and never chosen. Results are
    kept in the performance database as they come, so that stopping loses nothing.

    Args:
        operation: an operation, alias or function, at ``shapes`` or over a grid of sizes. Or a ``torch.nn.Module``: the calls
            it makes for ``inputs``, weighted by how often it makes them. The report then ends with one line: how long these
            calls take with torch's kernels and with the chosen ones, and which share of the module's time cannot be
            improved. The module runs a few times to measure that, where it and its inputs have memory.
        inputs: what the module is called with; keyword arguments that :func:`tune` does not have are its too. Without any,
            ``module.dummy_inputs`` or ``module.example_inputs``.
        dtype: the dtype of its data; what a model computes in. ``float32`` when not given.
        shapes: shapes of its main input; of attention ``(batch, seq, heads, head_dim)``.
        calls: calls as they are written down (see :func:`layerzero.manifest`), as JSON or mappings, or as
            :func:`layerzero.calls_of` gives them.
        model: a transformers configuration: as an object, a mapping with ``model_type``, the path of a ``config.json``, a
            name in the local Hugging Face cache, or a published one (``"gpt2"``, ``"llama-3-8b"``, …); or a transformers
            model. It is built without weights and traced: the calls it makes for prompts of ``seq`` tokens, and for one
            token more of ``context``, at each ``batch``. Needs transformers.
        known: every call that was measured before.
        budget: how long it may take: seconds, or text such as ``"60s"``. It is spent where the
            expected loss shrinks most for the time it takes.
        samples: how many rounds a call gets at least; the setting ``perfdb.tune_samples`` when not given.
        device: where: ``"cpu"``, ``"cuda:0"``, … By default where ``calls`` were traced or made, else torch's accelerator in
            use, else the CPU. The report says which.
        graph: time calls replayed in a CUDA graph instead of eager ones.
        layout: the layout of the calls.
        params: parameters of the calls.
        force: measure again what was measured before.
        progress: show how far it is: a bar on a terminal, a few lines elsewhere; by default on a terminal only.
        dims: sizes by dimension, of which every combination is measured: ``seq_lens=[512, 2048]``, ``head_dim=128``.
    """
    operation, traced, dims = _subject(operation, inputs, dims, model, dtype, batch, seq, context)
    request = _request(operation, dtype, shapes, calls, traced, known, device, graph, layout, params, dims)
    document = _measure(request, budget, samples, force=force, regret=False, progress=progress)
    if traced is None:
        return TuneReport(document)
    return TuneReport(document, forward.of(traced, request["device"]), traced.left_out)


def workload(
    operation: Any = None,
    *inputs: Any,
    dtype: Any = None,
    shapes: Sequence[Sequence[int]] | None = None,
    model: Any = None,
    batch: Sequence[int] | int = (),
    seq: Sequence[int] | int = (),
    context: Sequence[int] | int = (),
    known: bool = False,
    device: Any = None,
    layout: str | None = None,
    params: Mapping[str, Any] | None = None,
    **dims: Any,
) -> Workload:
    """The calls :func:`tune` would measure for the same arguments, as they are written down; ``.device`` is where.

    Of a model ``.counts`` says how often each is made, ``.coverage`` how much of the model they are and ``.left_out`` what is
    not among them.
    """
    operation, traced, dims = _subject(operation, inputs, dims, model, dtype, batch, seq, context)
    request = _request(operation, dtype, shapes, None, traced, known, device, False, layout, params, dims)
    calls = [json.loads(call) for call in _native.requested_calls(to_json(request))]
    return Workload(calls, _native.device_name(request["device"]), traced)


def explain_call(call: str | Mapping[str, Any], device: Any = None) -> SelectionReport:
    """As :func:`layerzero.explain`, for a call as it is written down, on a device (see :func:`tune`)."""
    _native.may_explain()
    text = call if isinstance(call, str) else to_json(call)
    data, table = _native.explain_call(text, devices.number(device))
    return SelectionReport(json.loads(data), table)


@waited_for
def regret(
    operation: Any = None,
    *inputs: Any,
    dtype: Any = None,
    shapes: Sequence[Sequence[int]] | None = None,
    calls: Iterable[str | Mapping[str, Any] | Call] | None = None,
    model: Any = None,
    batch: Sequence[int] | int = (),
    seq: Sequence[int] | int = (),
    context: Sequence[int] | int = (),
    budget: float | str = "60s",
    samples: int | None = None,
    device: Any = None,
    graph: bool = False,
    layout: str | None = None,
    params: Mapping[str, Any] | None = None,
    progress: bool | None = None,
    **dims: Any,
) -> dict[str, Any]:
    """Measures every kernel of these calls and compares what is chosen with the best in hindsight; nothing is kept.

    Takes what :func:`tune` takes. Gives the ``device``, ``geomean`` and ``worst`` of chosen time ÷ best time, ``times_baseline`` (how
    many times faster than plain torch) and ``rows``.
    """
    operation, traced, dims = _subject(operation, inputs, dims, model, dtype, batch, seq, context)
    request = _request(operation, dtype, shapes, calls, traced, False, device, graph, layout, params, dims)
    rows: dict[str, Any] = _measure(request, budget, samples, force=True, regret=True, progress=progress)
    return rows


def _written(call: str | Mapping[str, Any] | Call) -> Any:
    if isinstance(call, Call):
        call = call.spec
    return json.loads(call) if isinstance(call, str) else dict(call)


def _subject(
    operation: Any,
    inputs: tuple[Any, ...],
    dims: dict[str, Any],
    model: Any,
    dtype: Any,
    batch: Sequence[int] | int,
    seq: Sequence[int] | int,
    context: Sequence[int] | int,
) -> tuple[str | None, Traced | None, dict[str, Any]]:
    """What is asked about: an operation with its sizes, or the calls of a model."""
    lengths = {"batch": _sizes(batch), "seq": _sizes(seq), "context": _sizes(context)}
    if operation is not None and not isinstance(operation, str):
        if model is not None:
            raise _bad("two models are given", "give one of them, as the first argument or as model=")
        if not transformers_models.named(operation):
            return None, workloads.of_module(operation, inputs, dims), {}
        model, operation = operation, None
    if inputs:
        raise _bad(f"inputs are given, but no module that takes them: {inputs!r:.80}", "give the module first")
    if model is None:
        # Of an operation they are dimensions like any other.
        return operation, None, {**dims, **{name: sizes for name, sizes in lengths.items() if sizes}}
    if callable(model) and not hasattr(getattr(model, "config", None), "model_type"):
        # No configuration says what it is called with.
        return operation, workloads.of_module(model, (), {}), dims
    return operation, workloads.of_model(model, dtype, lengths["batch"], lengths["seq"], lengths["context"]), dims


def _request(
    operation: str | None,
    dtype: Any,
    shapes: Sequence[Sequence[int]] | None,
    calls: Iterable[str | Mapping[str, Any] | Call] | None,
    traced: Traced | None,
    known: bool,
    device: Any,
    graph: bool,
    layout: str | None,
    params: Mapping[str, Any] | None,
    dims: Mapping[str, Sequence[int] | int],
) -> dict[str, Any]:
    counts = calls.counts if isinstance(calls, Workload) else []
    calls = list(calls or ())
    counts = [*counts] or [call.count if isinstance(call, Call) else 1 for call in calls]
    made = traced.made if traced is not None else []
    return {
        "calls": [_written(call) for call in (*calls, *(traced.specs() if traced is not None else ()))],
        "counts": counts + (traced.counts() if traced is not None else []),
        "op": operation,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "shapes": [list(shape) for shape in shapes or ()],
        "dims": {name: _sizes(given) for name, given in dims.items()},
        "params": dict(params or {}),
        "layout": layout,
        "known": known,
        "device": devices.number(device, _one_device([*calls, *made]) if device is None else ()),
        "graph": graph,
    }


def _one_device(calls: Sequence[Any]) -> Sequence[Any]:
    """The calls, if those that say where they are made say the same."""
    said = sorted({call.device for call in calls if isinstance(call, Call)})
    if len(said) > 1:
        raise _bad(f"the calls are made on {', '.join(said)}", "measure those of one device at a time, or give device=")
    return [call for call in calls if isinstance(call, Call)]


def _sizes(given: Sequence[int] | int) -> list[int]:
    return [given] if isinstance(given, int) else list(given)


def _measure(
    request: dict[str, Any],
    budget: float | str,
    samples: int | None,
    *,
    force: bool,
    regret: bool,
    progress: bool | None,
) -> Any:
    shown = sys.stderr.isatty() if progress is None else progress
    if samples is None:
        samples = int(setting("perfdb.tune_samples"))
    try:
        tell = _teller() if shown else None
        return json.loads(_native.measure(to_json(request), seconds(budget), samples, force, 0, regret, tell))
    finally:
        fingerprints.measured()
        if shown:
            show_status("")


def _teller() -> Callable[[str], bool]:
    # What is not a terminal gets a line now and then instead of a bar that moves.
    moves = sys.stderr.isatty()
    told = -1

    def tell(text: str) -> bool:
        nonlocal told
        p = json.loads(text)
        full = 24 * p["done"] // max(p["calls"], 1)
        left = max(int(p["left_s"] + 0.999), 0)
        line = f"{p['done']}/{p['calls']} calls, {left // 60}:{left % 60:02} left"
        if moves:
            show_status(f"{'█' * full + '░' * (24 - full)} {line}  {p['current']}")
        elif full // 6 > told:
            print(line, file=sys.stderr, flush=True)
        told = max(told, full // 6)
        return True

    return tell
