"""``lz.tune`` and ``lz.regret``: measure here, remember, and see how good the choices are."""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from layerzero import _native, devices, fingerprints
from layerzero.control import setting
from layerzero.documents import to_json
from layerzero.errors import ConfigurationError
from layerzero.inspection import SelectionReport
from layerzero.lifecycle import waited_for
from layerzero.models import Call
from layerzero.printing import visible

_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0}


class TuneReport:
    """What tuning found out: ``device``, ``tuned`` (one entry per call), ``left``, ``impossible``, ``known``, ``spent_s``."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
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
        return self._document

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("call", "chosen", "runner-up", "×baseline")]
        for t in self.tuned:
            times = f"{t['times_baseline']:.2f}" if t["times_baseline"] else "–"
            rows.append((t["label"], t["chosen"] or "–", t["runner_up"] or "–", times))
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        out = [f"out: {kernel}: {why}" for t in self.tuned for kernel, why in t["out"]]
        rest = [f"not measured: {call['op']}: {why}" for call, why in self.impossible]
        last = f"{len(self.tuned)} measured on {self.device} in {self.spent_s:.1f} s, {self.known} known"
        return visible("\n".join([*lines, *out, *rest, last]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *body = self._rows()

        def cells(row: tuple[str, ...], tag: str) -> str:
            return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)

        lines = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in body)
        return f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{lines}</tbody></table>"


class Workload(list[dict[str, Any]]):
    """Calls as they are written down, and the device they would be made on."""

    def __init__(self, calls: Iterable[dict[str, Any]], device: str) -> None:
        super().__init__(calls)
        #: What torch calls the device.
        self.device = device


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
    operation: str | None = None,
    *,
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
    **dims: Sequence[int] | int,
) -> TuneReport:
    """Measures every kernel that can serve these calls, side by side, and goes by it from then on.

    Each kernel is first compared with the reference: one that is wrong is never timed and never chosen. Results are
    kept in the performance database as they come, so that stopping loses nothing.

    Args:
        operation: an operation, alias or function, at ``shapes`` or over a grid of sizes.
        dtype: the dtype of its data; what a model computes in. ``float32`` when not given.
        shapes: shapes of its main input; of attention ``(batch, seq, heads, head_dim)``.
        calls: calls as they are written down (see :func:`layerzero.manifest`), as JSON or mappings, or as
            :func:`layerzero.calls_of` gives them.
        model: a known model (``"gpt2"``, ``"llama-3-8b"``, …), the path of a transformers ``config.json``, or a
            transformers config: the calls such a model makes at the lengths in ``batch``, ``seq`` and ``context``.
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
    request = _request(
        operation, dtype, shapes, calls, model, batch, seq, context, known, device, graph, layout, params, dims
    )
    return TuneReport(_measure(request, budget, samples, force=force, regret=False, progress=progress))


def workload(
    operation: str | None = None,
    *,
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
    **dims: Sequence[int] | int,
) -> Workload:
    """The calls :func:`tune` would measure for the same arguments, as they are written down; ``.device`` is where."""
    request = _request(
        operation, dtype, shapes, None, model, batch, seq, context, known, device, False, layout, params, dims
    )
    calls = [json.loads(call) for call in _native.requested_calls(to_json(request))]
    return Workload(calls, _native.device_name(request["device"]))


def explain_call(call: str | Mapping[str, Any], device: Any = None) -> SelectionReport:
    """As :func:`layerzero.explain`, for a call as it is written down, on a device (see :func:`tune`)."""
    _native.may_explain()
    text = call if isinstance(call, str) else to_json(call)
    data, table = _native.explain_call(text, devices.number(device))
    return SelectionReport(json.loads(data), table)


@waited_for
def regret(
    operation: str | None = None,
    *,
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
    **dims: Sequence[int] | int,
) -> dict[str, Any]:
    """Measures every kernel of these calls and compares what is chosen with the best in hindsight; nothing is kept.

    Takes what :func:`tune` takes. Gives the ``device``, ``geomean`` and ``worst`` of chosen time ÷ best time, ``times_baseline`` (how
    many times faster than plain torch) and ``rows``.
    """
    request = _request(
        operation, dtype, shapes, calls, model, batch, seq, context, False, device, graph, layout, params, dims
    )
    rows: dict[str, Any] = _measure(request, budget, samples, force=True, regret=True, progress=progress)
    return rows


def _written(call: str | Mapping[str, Any] | Call) -> Any:
    if isinstance(call, Call):
        call = call.spec
    return json.loads(call) if isinstance(call, str) else dict(call)


def _request(
    operation: str | None,
    dtype: Any,
    shapes: Sequence[Sequence[int]] | None,
    calls: Iterable[str | Mapping[str, Any] | Call] | None,
    model: Any,
    batch: Sequence[int] | int,
    seq: Sequence[int] | int,
    context: Sequence[int] | int,
    known: bool,
    device: Any,
    graph: bool,
    layout: str | None,
    params: Mapping[str, Any] | None,
    dims: Mapping[str, Sequence[int] | int],
) -> dict[str, Any]:
    lengths = {"batch": _sizes(batch), "seq": _sizes(seq), "context": _sizes(context)}
    sizes = {name: _sizes(given) for name, given in dims.items()}
    if model is None:
        # Of an operation they are dimensions like any other.
        sizes |= {name: given for name, given in lengths.items() if given}
        lengths = {}
    calls = list(calls or ())
    return {
        "calls": [_written(call) for call in calls],
        "op": operation,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "shapes": [list(shape) for shape in shapes or ()],
        "dims": sizes,
        "params": dict(params or {}),
        "layout": layout,
        "model": _model(model),
        **lengths,
        "known": known,
        "device": devices.number(device, _one_device(calls) if device is None else ()),
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


def _model(model: Any) -> str | None:
    if model is None or isinstance(model, str):
        return model
    config = getattr(model, "config", model)
    if hasattr(config, "to_json_string"):
        text: str = config.to_json_string(use_diff=False)
        return text
    if hasattr(model, "__fspath__"):
        return str(model)
    raise _bad(
        f"the model is a {type(model).__name__}", "give a name, the path of a config.json, or a transformers config"
    )


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
        if shown and sys.stderr.isatty():
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


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
            sys.stderr.write(f"\r\x1b[2K{'█' * full + '░' * (24 - full)} {line}  {p['current']}")
        elif full // 6 > told:
            sys.stderr.write(line + "\n")
        told = max(told, full // 6)
        sys.stderr.flush()
        return True

    return tell
