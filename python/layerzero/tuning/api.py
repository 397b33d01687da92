"""``lz.tune`` and ``lz.regret``: measure here, remember, and see how good the choices are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from layerzero import _native, devices, fingerprints, workloads
from layerzero.control import setting
from layerzero.documents import to_json
from layerzero.errors import ConfigurationError
from layerzero.inspection import SelectionReport
from layerzero.integrations._transformers import models as transformers_models
from layerzero.lifecycle import waited_for
from layerzero.printing import Progress
from layerzero.results import Result
from layerzero.tuning import forward
from layerzero.tuning.reports import RegretReport, TuneReport
from layerzero.workloads import Traced, Workload

_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0}


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
    calls: Iterable[str | Mapping[str, Any] | Result] | None = None,
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
    """Measures every kernel that can serve these calls, side by side. From then on the fastest ones are used.

    Each kernel is first compared with the reference: one that is wrong is never timed and never chosen. Results are
    kept in the performance database as they come, so that stopping loses nothing.

    Args:
        operation: an operation, alias or function, at ``shapes`` or over a grid of sizes. Or a :class:`layerzero.Workload`,
            alone: its calls, by default on its device. Or a ``torch.nn.Module``: the calls
            it makes for ``inputs``, weighted by how often it makes them. The report then ends with one line: how long these
            calls take with torch's kernels and with the chosen ones, and which share of the module's time cannot be
            improved. The module runs a few times to measure that, where it and its inputs have memory.
        inputs: what the module is called with; keyword arguments that :func:`tune` does not have are its too. Without any,
            ``module.dummy_inputs`` or ``module.example_inputs``.
        dtype: the dtype of its data; what a model computes in. ``float32`` when not given.
        shapes: shapes of its main input; of attention ``(batch, seq, heads, head_dim)``.
        calls: calls as they are written down, as JSON or mappings, or as :func:`layerzero.calls_of`,
            :func:`layerzero.manifest` or :func:`workload` give them.
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
    if isinstance(operation, Workload):
        _alone(
            dims,
            inputs=inputs,
            dtype=dtype,
            shapes=shapes,
            calls=calls,
            model=model,
            batch=batch,
            seq=seq,
            context=context,
            known=known,
            layout=layout,
            params=params,
        )
        operation, calls = None, operation
    operation, traced, dims = _subject(operation, inputs, dims, model, dtype, batch, seq, context, progress)
    request = _request(operation, dtype, shapes, calls, traced, known, device, graph, layout, params, dims)
    document = _measure(request, budget, samples, force=force, regret=False, progress=progress)
    if traced is not None:
        times = forward.of(traced.calls, traced.coverage(), request["device"], traced.run)
        return TuneReport._from(document, times, traced.left_out)
    if isinstance(calls, Workload) and calls._passes is not None:
        times = forward.of(calls._passes, calls.coverage, request["device"])
        return TuneReport._from(document, times, calls.left_out)
    return TuneReport._from(document)


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
    progress: bool | None = None,
    **dims: Any,
) -> Workload:
    """The calls :func:`tune` and :func:`regret` would measure for the same arguments. Both take it: ``lz.tune(workload)``.

    For a model, ``.counts`` has how often each call is made, ``.coverage`` which share of the model the calls are, and
    ``.left_out`` what is missing. ``progress`` shows how far tracing it is, by default on a terminal only.
    """
    operation, traced, dims = _subject(operation, inputs, dims, model, dtype, batch, seq, context, progress)
    request = _request(operation, dtype, shapes, None, traced, known, device, False, layout, params, dims)
    calls = tuple(json.loads(call) for call in _native.requested_calls(to_json(request)))
    counts = tuple(request["counts"])
    return Workload(
        calls=calls,
        counts=counts + (1,) * (len(calls) - len(counts)),
        device=_native.device_name(request["device"]),
        coverage=traced.coverage() if traced is not None else None,
        left_out=tuple(traced.left_out) if traced is not None else (),
        _passes=dict(traced.calls) if traced is not None else None,
    )


def explain_call(call: str | Mapping[str, Any] | Result, device: Any = None) -> SelectionReport:
    """As :func:`layerzero.explain`, for a call as it is written down, on a device (see :func:`tune`)."""
    _native.may_explain()
    text = call if isinstance(call, str) else to_json(workloads.written(call)[0])
    data, table = _native.explain_call(text, devices.number(device))
    return SelectionReport._from(json.loads(data), table)


@waited_for
def regret(
    operation: Any = None,
    *inputs: Any,
    dtype: Any = None,
    shapes: Sequence[Sequence[int]] | None = None,
    calls: Iterable[str | Mapping[str, Any] | Result] | None = None,
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
) -> RegretReport:
    """Measures every kernel of these calls and compares what is chosen with the best in hindsight; nothing is kept.

    Takes what :func:`tune` takes. Gives the ``device``, ``geomean`` and ``worst`` of chosen time ÷ best time, ``times_baseline`` (how
    many times faster than plain torch) and ``rows``.
    """
    if isinstance(operation, Workload):
        _alone(
            dims,
            inputs=inputs,
            dtype=dtype,
            shapes=shapes,
            calls=calls,
            model=model,
            batch=batch,
            seq=seq,
            context=context,
            layout=layout,
            params=params,
        )
        operation, calls = None, operation
    operation, traced, dims = _subject(operation, inputs, dims, model, dtype, batch, seq, context, progress)
    request = _request(operation, dtype, shapes, calls, traced, False, device, graph, layout, params, dims)
    return RegretReport._from(_measure(request, budget, samples, force=True, regret=True, progress=progress))


def _alone(dims: Mapping[str, Any], **others: Any) -> None:
    """A workload says all there is to measure: which calls, of which dtype and sizes."""
    # By identity and type: comparing tensors and modules may do anything.
    absent = {
        n for n, value in others.items() if value is None or value is False or (type(value) is tuple and not value)
    }
    given = [*dims, *(name for name in others if name not in absent)]
    if given:
        raise _bad(
            f"a workload is given, and with it {', '.join(given)}",
            "give the workload alone; device=, graph=, budget= and samples= may be added",
        )


def _subject(
    operation: Any,
    inputs: tuple[Any, ...],
    dims: dict[str, Any],
    model: Any,
    dtype: Any,
    batch: Sequence[int] | int,
    seq: Sequence[int] | int,
    context: Sequence[int] | int,
    progress: bool | None,
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
    traced = workloads.of_model(model, dtype, lengths["batch"], lengths["seq"], lengths["context"], progress=progress)
    return operation, traced, dims


def _request(
    operation: str | None,
    dtype: Any,
    shapes: Sequence[Sequence[int]] | None,
    calls: Iterable[str | Mapping[str, Any] | Result] | None,
    traced: Traced | None,
    known: bool,
    device: Any,
    graph: bool,
    layout: str | None,
    params: Mapping[str, Any] | None,
    dims: Mapping[str, Sequence[int] | int],
) -> dict[str, Any]:
    counts: list[int] = []
    if isinstance(calls, Workload):
        counts, device = [*calls.counts], calls.device if device is None else device
        # Only a workload of what was measured before may be empty.
        known = known or not calls
    calls = list(calls or ())
    counts = counts or [getattr(call, "count", 1) if isinstance(call, Result) else 1 for call in calls]
    asked = [workloads.written(call) for call in calls]
    places = [{"device": on} for _, on in asked if on is not None]
    places += [{"device": call.device} for call in (traced.made if traced is not None else ())]
    if device is None:
        _agree(places)
    return {
        "calls": [call for call, _ in asked] + [json.loads(call) for call in (traced.specs() if traced else ())],
        "counts": counts + (traced.counts() if traced is not None else []),
        "op": operation,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "shapes": [list(shape) for shape in shapes or ()],
        "dims": {name: _sizes(given) for name, given in dims.items()},
        "params": dict(params or {}),
        "layout": layout,
        "known": known,
        "device": devices.number(device, places if device is None else ()),
        "graph": graph,
    }


def _agree(places: Iterable[Mapping[str, str]]) -> None:
    """Calls are measured on one device: those that say where they are made say the same."""
    said = sorted({place["device"] for place in places})
    if len(said) > 1:
        raise _bad(f"the calls are made on {', '.join(said)}", "measure those of one device at a time, or give device=")


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
    if samples is None:
        samples = int(setting("perfdb.tune_samples"))
    with Progress(progress, "calls") as shown:

        def tell(text: str) -> bool:
            p = json.loads(text)
            shown.show(p["done"], p["calls"], p["left_s"], p["current"])
            return True

        told = tell if shown.shown else None
        try:
            return json.loads(_native.measure(to_json(request), seconds(budget), samples, force, 0, regret, told))
        finally:
            fingerprints.measured()
