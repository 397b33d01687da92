"""The process that tries backends. It says what it is about to do before it does it, so that its end tells something.

Reports are lines of JSON, written to a pipe: what a library prints does not get in between.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

#: How many calls are tried on a kernel before it is given up.
TRIES = 200
# PR_SET_PDEATHSIG of Linux.
_DEATH_SIGNAL = 1

Report = Callable[..., None]


def main(request: str, channel: int) -> None:
    """Does what is asked and ends the process.

    Args:
        request: JSON: ``backends``, which are loaded in this order, and ``calls``, by backend and kernel; ``null`` has
            them looked for, one for each kernel.
        channel: the pipe reports are written to.
    """
    _end_with_parent()
    # What a library starts must not keep the pipe open.
    os.set_inheritable(channel, False)

    def report(at: str, **fields: Any) -> None:
        os.write(channel, (json.dumps({"at": at, **fields}) + "\n").encode())

    asked = json.loads(request)
    _prepare()
    report("ready")
    found = [backend for backend in asked["backends"] if _load(backend, report)]
    for backend in found:
        if asked["calls"] is None:
            _search(backend, report)
        else:
            for kernel, call in asked["calls"].get(backend, {}).items():
                _judge(kernel, call, report)
    report("done")
    sys.stdout.flush()
    # What libraries do when the interpreter ends is not asked about.
    os._exit(0)


def _end_with_parent() -> None:
    """Nobody is left to stop this process when the one that started it is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _prepare() -> None:
    """The engine with nothing in it: no files, no plugins, no measurements."""
    from layerzero import loading

    loading.nothing()
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)


def _load(backend: str, report: Report) -> bool:
    from layerzero import _native, backend_files, loading
    from layerzero.compat import builds

    report("import", backend=backend)
    folder, library = backend_files.folder(backend), backend_files.library(backend)
    loading.import_backend(backend, (folder / "capabilities.json").read_text(encoding="utf-8"))
    state = next(b for b in json.loads(_native.backends()) if b["name"] == backend_files.document(backend)["backend"])
    unavailable = state["unavailable"]
    torch = sys.modules.get("torch")
    report(
        "imported",
        backend=backend,
        version=None if unavailable else state["version"],
        unavailable=unavailable,
        torch=torch and torch.__version__,
        cuda=torch and torch.version.cuda,
        library_cuda=None if library == "torch" else builds.built_for(library).cuda,
        devices=[device["name"] for device in json.loads(_native.devices())],
    )
    return unavailable is None


def _search(backend: str, report: Report) -> None:
    """Every kernel of a backend, each with a small call that it takes."""
    from layerzero import backend_files

    for operation, kernels in backend_files.document(backend)["ops"].items():
        for kernel in kernels:
            name = kernel["kernel_id"]
            # Looking for a call runs nothing of the library, but may hang or die as anything may.
            report("look", backend=backend, kernel=name)
            call, why = _call(kernel, operation)
            if call is None:
                report("judged", kernel=name, status="not tried", why=why)
            else:
                _judge(name, call, report)


def _call(kernel: Mapping[str, Any], operation: str) -> tuple[dict[str, Any] | None, str]:
    """A call a kernel takes on a device of this machine: as it is written down, with ``device``, ``grad`` (whether its
    data wants gradients) and ``jit`` (whether the kernel is compiled first)."""
    import itertools

    from layerzero import _native
    from layerzero.compat import calls
    from layerzero.errors import LayerZeroError

    name = kernel["kernel_id"]
    registered = next(k for k in json.loads(_native.list_kernels()) if k["kernel_id"] == name)
    if registered["unavailable"]:
        return None, registered["unavailable"][0]
    if registered["dispatch"] == "described":
        return None, "its adapter has no function for it"
    devices = [i for i, d in enumerate(json.loads(_native.devices())) if d["platform"] in registered["platforms"]]
    if not devices:
        return None, f"there is no {' or '.join(registered['platforms'])} device"
    nearest: list[str] | None = None
    for call in itertools.islice(calls.candidates(kernel, operation), TRIES):
        for grad in (False, True):
            try:
                reasons = _against(name, call, devices[0], grad)
            except (LayerZeroError, ValueError) as error:
                reasons = [str(error).partition("\n")[0]]
            if not reasons:
                return {"call": call, "device": devices[0], "grad": grad, "jit": registered["jit"]}, ""
            if nearest is None or len(reasons) < len(nearest):
                nearest = reasons
    return None, nearest[0] if nearest else "no small call of its operation is known"


def _against(kernel: str, call: Mapping[str, Any], device: int, grad: bool) -> list[str]:
    from layerzero import _native

    if not grad:
        report = json.loads(_native.explain_call(json.dumps(call), device)[0])
        candidate = next((c for c in report["candidates"] if c["kernel_id"] == kernel), None)
        if candidate is None:
            return ["the call is of another operation"]
        return [] if candidate["accepted"] else [reason["message"] for reason in candidate["reasons"]]
    _, kwargs = _inputs(call, device, grad)
    return [reason.message for reason in _native.validate(kernel, **kwargs)]


def _inputs(call: Mapping[str, Any], device: int, grad: bool) -> tuple[Any, dict[str, Any]]:
    from layerzero.tuning.inputs import make

    inputs = make(json.dumps(call), device)
    kwargs = inputs.copied()
    if grad:
        kwargs = {k: v.clone().requires_grad_() if _is_data(v) else v for k, v in kwargs.items()}
    return inputs, kwargs


def _is_data(value: Any) -> bool:
    return bool(getattr(value, "is_floating_point", lambda: False)())


def _judge(kernel: str, call: Mapping[str, Any], report: Report) -> None:
    """Runs a kernel once and compares what it gives with what is right."""
    from layerzero import _native

    report("run", kernel=kernel, jit=call["jit"])
    status, why = "right", None
    try:
        why = _difference(kernel, call)
        status = "wrong" if why else "right"
    except Exception as error:  # noqa: BLE001 - whatever a library raises is its result
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        status = "not tried" if type(error).__name__ in ("OutOfMemoryError", "MemoryError") else "failed"
        _native.forget_failures()
    report("judged", kernel=kernel, status=status, why=why, call=call)
    if status == "failed" and call["device"] > 0:
        _look_after_context(kernel, report)


def _difference(kernel: str, call: Mapping[str, Any]) -> str | None:
    from layerzero import _native
    from layerzero.checks import synchronize
    from layerzero.tuning.gate import Gate

    inputs, kwargs = _inputs(call["call"], call["device"], call["grad"])
    gate = Gate(inputs)
    if not call["grad"]:
        wrong = gate.judge(kernel)[1]
    else:
        result = _native.Subject(inputs.function, kwargs).run(kernel)
        results = result if isinstance(result, tuple | list) else [result]
        wrong = gate.judge_results(tuple(r.detach() for r in results))[1]
    if call["device"] > 0:
        synchronize()
    return wrong


def _look_after_context(kernel: str, report: Report) -> None:
    """An error that stays with the device would be blamed on every kernel after it."""
    import torch

    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).item()
    except torch.OutOfMemoryError:
        return
    except RuntimeError as error:
        report("lost", kernel=kernel, why=str(error).strip().partition("\n")[0])
        os._exit(0)
