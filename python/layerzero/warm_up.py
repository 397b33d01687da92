"""Kernels that are compiled on first use, compiled before they are needed: ``lz.warmup``, and in the background.

A call never waits for a compiler while another kernel can serve it. What would have served it, had it been compiled, is
compiled from the first call of its kind on, and serves as soon as it is. One daemon thread sees to that. It has a child
process compile what that can (:mod:`layerzero.compile_jobs`), and loads it from the cache on disk; the rest it compiles
by itself.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerzero import _native, compile_jobs, devices, disk_caches, events, graphs, kernel_runs, loading
from layerzero.compile_child import ChildError, CompileChild, NotCompiledError, Status, UnavailableError
from layerzero.control import setting
from layerzero.documents import to_json
from layerzero.errors import InvalidCallError, LayerZeroError, named_line
from layerzero.lifecycle import start_thread
from layerzero.models import calls_of, model_hash
from layerzero.results import KeyedResult, Result, Rows, Table, plain, rows
from layerzero.workloads import ManifestEntry, written

if TYPE_CHECKING:
    from layerzero.tuning.reports import TuneReport

#: How long the end of the program waits for a compilation that does not let itself be stopped, in seconds.
_PATIENCE = 60.0
#: How many kernels are compiled at once at most.
_TOGETHER = 16


@dataclass(frozen=True, slots=True, repr=False)
class WarmedCall(KeyedResult):
    """What a warm-up did for one call."""

    call: dict[str, Any]
    """The call, as it is written down."""
    device: str
    """Its device."""
    kernel: str | None
    """The kernel: the one that was compiled or proven, or that serves the call; ``None`` when the call itself is at fault."""
    ms: float | None = None
    """How long compiling took."""
    error: str | None = None
    """What went wrong."""


class WarmupReport(Result):
    """What a warm-up did. It fills while the warm-up is under way; :meth:`wait` waits for its end."""

    def __init__(self, wanted: list[tuple[str, str]], notes: list[str]) -> None:
        #: Calls still to be looked at, as ``(call, device)``.
        self.pending: list[tuple[str, str]] = wanted
        #: What torch calls the devices the calls are made on.
        self.devices: list[str] = sorted({device for _, device in wanted})
        #: Kernels that were compiled.
        self.compiled: list[WarmedCall] = []
        #: Calls for which nothing had to be compiled.
        self.already_warm: list[WarmedCall] = []
        #: With ``graph_strict_mode``, kernels that were captured in a CUDA graph and replayed, and are proven there for the
        #: call.
        self.proven: list[WarmedCall] = []
        #: What went wrong.
        self.failed: list[WarmedCall] = []
        #: What is to be said about it.
        self.notes = notes
        #: What tuning found, where ``auto_tune_on_warmup`` is set.
        self.tuned: list[TuneReport] = []
        #: Seconds spent so far.
        self.seconds = 0.0
        self._begun = time.perf_counter()
        self._over = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is over, or for so many seconds. Whether it is over."""
        return self._over.wait(timeout)

    @property
    def ok(self) -> bool:
        """Whether every call was looked at and nothing went wrong."""
        return not self.pending and not self.failed

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""
        names = ("devices", "compiled", "already_warm", "proven", "failed", "notes", "seconds", "tuned")
        pending = [{"call": json.loads(call), "device": device} for call, device in self.pending]
        return {"schema_version": "1.0", "ok": self.ok, "pending": pending} | {
            name: plain(getattr(self, name)) for name in names
        }

    def _table(self) -> Table:
        counts = [
            f"{len(self.compiled)} compiled",
            f"{len(self.already_warm)} ready before",
            *([f"{len(self.proven)} proven in graphs"] if self.proven else []),
            f"{len(self.failed)} failed",
            f"{len(self.pending)} pending",
        ]
        where = f" on {', '.join(self.devices)}" if self.devices else ""
        notes = [*self.notes]
        notes += [f"compiled {c.kernel} in {c.ms:.0f} ms" for c in self.compiled]
        notes += [f"failed {f.kernel or json.dumps(f.call)}: {f.error}" for f in self.failed]
        return Table(f"{', '.join(counts)}{where}, in {self.seconds:.1f} s", (), (), notes)


def warmup(
    operation: str | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
    dtype: Any = None,
    *,
    calls: Iterable[Any] | None = None,
    manifest: bool | str | os.PathLike[str] | None = None,
    model: Any = None,
    device: Any = None,
    block: bool = True,
    timeout: float | None = None,
) -> WarmupReport:
    """Compiles the kernels of these calls and decides the calls, so that your first real call is as fast as later ones.

    For each call the best kernel is compiled. A kernel that cannot be compiled is no error: it is in the report, and
    another kernel serves. With ``auto_tune_on_warmup`` the calls
    are measured as well. With ``graph_strict_mode`` the kernel that a CUDA graph would record for a call is captured and
    replayed, and proven for the call's cell of sizes; no graph may be captured elsewhere in the process meanwhile.

    Args:
        operation: an operation, alias or function, at ``shapes``.
        shapes: shapes of its main input; of attention ``(batch, seq, heads, head_dim)``.
        dtype: the dtype of its data.
        calls: calls as :func:`layerzero.calls_of` and :func:`layerzero.manifest` give them, or as JSON.
        manifest: the calls of earlier processes: ``True`` for the file of the configuration, or a path.
        model: with ``manifest`` the model whose calls count; without, the model whose calls are found out by tracing.
        device: where calls are made that do not say; by default torch's accelerator in use, else the CPU.
        block: whether to wait for the end.
        timeout: how long to wait at most, in seconds. What is left then goes on in the background.
    """
    loading.load()
    notes: list[str] = []
    found = list(dict.fromkeys(_wanted(operation, shapes, dtype, calls, manifest, model, device, notes)))
    report = WarmupReport(found, notes)
    if not _worker.add(report):
        report.notes.append("nothing was compiled: the program is ending")
        report._over.set()
    if block and not _worker.is_current():
        report.wait(timeout)
    return report


def _wanted(
    operation: str | None,
    shapes: Sequence[Sequence[int]] | None,
    dtype: Any,
    calls: Iterable[Any] | None,
    manifest: bool | str | os.PathLike[str] | None,
    model: Any,
    device: Any,
    notes: list[str],
) -> Iterator[tuple[str, str]]:
    """Every call that is asked for, with its device."""
    if operation is None and calls is None and not manifest and model is None:
        raise InvalidCallError(
            "nothing is asked for: give an operation with shapes, calls, a manifest or a model",
            code="NOTHING_TO_WARM_UP",
            hint='for example lz.warmup("attention.causal", shapes=[(1, 1024, 16, 128)], dtype=torch.float16)',
        )
    if operation is None and shapes is not None:
        raise InvalidCallError(
            "shapes were given, but no operation they are of", code="NOTHING_TO_WARM_UP", hint="name the operation"
        )
    if operation is not None:
        request = {"op": operation, "dtype": _dtype_name(dtype), "shapes": [list(shape) for shape in shapes or ()]}
        for call in _native.requested_calls(to_json(request)):
            yield call, devices.resolve(device)
    for call in calls or ():
        yield _written(call, device)
    if manifest:
        of_model = None if model is None else model_hash(model)
        text, models = _native.read_manifest(None if manifest is True else Path(manifest), of_model)
        entries = json.loads(text)
        if not entries:
            whose = "of this model" if model is not None else "of which no model is known"
            notes.append(f"the manifest has no calls {whose} that are recent enough ({models} models are in it)")
        for entry in entries:
            yield _written(entry, device)
    elif model is not None:
        for traced in calls_of(model):
            yield traced.spec, traced.device


def _written(call: Any, device: Any) -> tuple[str, str]:
    """A call and its device: of one that was traced, an entry of a manifest, or one that is written down."""
    data, on = written(call)
    return to_json(data), on or devices.resolve(device)


def _dtype_name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def manifest() -> Rows[ManifestEntry]:
    """The kinds of calls this process made, the last one first. :func:`tune`, :func:`regret` and :func:`warmup` take them."""
    return rows((ManifestEntry(**entry) for entry in json.loads(_native.manifest())), "calls")


def save_manifest(path: str | os.PathLike[str] | None = None, *, model: Any = None) -> Path:
    """Adds the calls of this process to a file, for :func:`warmup` of the next one, and gives its path.

    ``path`` is that of the setting ``jit.manifest_path`` when not given. ``model`` is the model that made the calls, or
    its hash (:func:`layerzero.model_hash`): calls of several models are kept apart.
    """
    loading.load()
    of_model = model if model is None or isinstance(model, str) else model_hash(model)
    return Path(_native.save_manifest(None if path is None else Path(path), of_model))


def wake() -> None:
    """Something waits to be compiled."""
    _worker.wake()


def stop() -> None:
    """Ends the thread that compiles: the program is ending."""
    _worker.stop()


def compiler() -> Status:
    """Who compiles in the background, and why, where that is not a child."""
    return _worker.child.status()


class _ProgramEnds(SystemExit):
    """Ends the thread that compiles, wherever it is. Python prints nothing about a thread that ends by it."""


def _say_nothing_of_ends() -> None:
    """The exception may come up in a destructor or a callback, where Python prints it and goes on: not this one."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is not _ProgramEnds:
            before(unraisable)

    sys.unraisablehook = hook


def _raise_in(thread: threading.Thread, exception: type[BaseException]) -> None:
    """Has a thread raise an exception at its next step in Python."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(exception))


def _end_programs_of(thread: threading.Thread) -> bool:
    """Asks the compilers that a thread started and waits for to end, and those that they started; whether there are any.
    Where the system does not tell them, they go on."""
    found = _children(f"/proc/self/task/{thread.native_id}")
    for program in found:
        found += [child for task in Path(f"/proc/{program}/task").glob("*") for child in _children(str(task))]
    for program in found:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(program, signal.SIGTERM)
    return bool(found)


def _children(task: str) -> list[int]:
    try:
        return [int(child) for child in Path(task, "children").read_text(encoding="ascii").split()]
    except OSError:
        return []


class _Worker:
    """One daemon thread that compiles: first what warm-ups ask for, then what calls would have used."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reports: deque[WarmupReport] = deque()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.child = CompileChild()

    def add(self, report: WarmupReport) -> bool:
        """Has a report filled; ``False`` when nobody is there to do so."""
        with self._changed:
            self._reports.append(report)
            return self.wake()

    def wake(self) -> bool:
        with self._changed:
            if self._stopped:
                return False
            if self._thread is None:
                self._thread = start_thread(self._run, "layerzero-compile")
            self._changed.notify_all()
            return self._thread is not None

    def is_current(self) -> bool:
        """Whether this is the thread: it cannot wait for itself."""
        return self._thread is threading.current_thread()

    def stop(self) -> None:
        """Ends the thread, and a compilation under way with it: the thread must not meet an interpreter that shuts down.

        A compiler stops at its next step in Python, or when the program it waits for ends.
        """
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            thread = self._thread
        self.child.end()
        if thread is None or thread is threading.current_thread():
            return
        until = time.monotonic() + _PATIENCE
        # What it is doing when it is first asked may end by itself.
        thread.join(0.05)
        _say_nothing_of_ends()
        while thread.is_alive() and time.monotonic() < until:
            # Programs first: an exception would have their input files removed while they read them.
            if not _end_programs_of(thread):
                _raise_in(thread, _ProgramEnds)
            thread.join(0.05)

    def forked(self) -> None:
        """In a child: the thread is the parent's, and so is whoever waits for a warm-up."""
        was_there = self._thread is not None
        self.child.forked()
        self.__init__()  # type: ignore[misc]
        # Without the thread nothing was ever queued, and the engine may not even exist.
        if was_there and _native.jit_forked():
            self.wake()

    def _run(self) -> None:
        with suppress(_ProgramEnds):
            while (work := self._next()) is not None:
                if isinstance(work, WarmupReport):
                    _warm_up(work, lambda: self._stopped)
                else:
                    _compile_all([work, *self._more(work)], self.child, lambda: self._stopped)

    def _next(self) -> WarmupReport | tuple[int, str, str, int] | None:
        while True:
            with self._changed:
                if self._stopped:
                    return None
                if self._reports:
                    return self._reports.popleft()
                job = _native.jit_next()
                if job is not None:
                    return job
                self._changed.wait()

    def _more(self, first: tuple[int, str, str, int]) -> Iterator[tuple[int, str, str, int]]:
        """What else waits to be compiled, if it may go together with the first."""
        if not compile_jobs.is_ahead(first[1], first[3]):
            return
        for _ in range(_TOGETHER - 1):
            if (job := _native.jit_next()) is None:
                return
            yield job


def _warm_up(report: WarmupReport, stopped: Any) -> None:
    """Looks at the calls of a report one by one."""
    done: list[tuple[str, str]] = []
    try:
        while report.pending and not stopped():
            call, device = report.pending[0]
            try:
                _warm_one(report, call, device)
                done.append((call, device))
            except LayerZeroError as error:
                report.failed.append(_told(call, device, kernel=None, error=error.message))
            report.seconds = time.perf_counter() - report._begun
            del report.pending[0]
        report.tuned += _tuned(done)
    except BaseException as error:  # noqa: BLE001
        # Nobody is there to catch it, and whoever waits is to know.
        report.notes.append(f"the warm-up ended early: {named_line(error)}")
    finally:
        report.seconds = time.perf_counter() - report._begun
        report._over.set()


def _warm_one(report: WarmupReport, call: str, device: str) -> None:
    number = _native.device_number(device)
    tried = False
    for kernel, error, ms in _compile_wanted(call, number, capturing=False):
        tried = True
        if error is None:
            report.compiled.append(_told(call, device, kernel=kernel, ms=ms))
        elif _native.jit_wanted(call, number) != kernel:
            # It was given up, after being tried again.
            report.failed.append(_told(call, device, kernel=kernel, error=error))
    kernel = _native.plan_call(call, number)
    if not tried:
        report.already_warm.append(_told(call, device, kernel=kernel))
    if graphs.captures(number) and graphs.limits().strict:
        compile_for_capture(call, number)
        for kernel, doubt in graphs.prove_wanted(call, number):
            if doubt is None:
                report.proven.append(_told(call, device, kernel=kernel))
            else:
                error = f"not safe in a CUDA graph: {to_json(doubt)}"
                report.failed.append(_told(call, device, kernel=kernel, error=error))


def _compile_wanted(call: str, device: int, capturing: bool) -> Iterator[tuple[str, str | None, float]]:
    """Compiles what would serve a call, best first: kernel, what went wrong, milliseconds."""
    tried: dict[str, str | None] = {}
    while (kernel := _native.jit_wanted(call, device, capturing)) is not None and tried.get(kernel, "") is not None:
        tried[kernel], ms = _compile(_native.jit_begin(kernel, call, device), kernel, call, device)
        yield kernel, tried[kernel], ms


def compile_for_capture(call: str, device: int) -> None:
    """Compiles, here and now, what would serve a call inside a capture."""
    for _ in _compile_wanted(call, device, capturing=True):
        pass


def _told(call: str, device: str, kernel: str | None, ms: float | None = None, error: str | None = None) -> WarmedCall:
    return WarmedCall(json.loads(call), device, kernel, ms, error)


def _compile(
    number: int, kernel: str, call: str, device: int, child: CompileChild | None = None
) -> tuple[str | None, float]:
    """Has the child compile a kernel, if there is one and it can, and runs the kernel once on inputs made up for a call. Gives
    what went wrong, and the milliseconds it took."""
    begun = time.perf_counter()
    before = disk_caches.states()
    elsewhere = 0.0
    try:
        if child is not None:
            elsewhere = _compile_in(child, kernel, call, device)
        ms = kernel_runs.once(kernel, call, device)
        compile_jobs.came_out(kernel, elsewhere, ms)
        caches = disk_caches.holding(loading.brought(kernel) or "", before)
        _native.jit_done(number, elsewhere + ms, caches)
    except BaseException as error:  # noqa: BLE001
        # Whatever a compiler raises, no caller has anything to do with it.
        told = str(error) if isinstance(error, ChildError) else named_line(error)
        _native.jit_failed(number, told)
        return told, (time.perf_counter() - begun) * 1e3
    return None, elsewhere + ms


def _compile_all(jobs: list[tuple[int, str, str, int]], child: CompileChild, stopped: Callable[[], bool]) -> None:
    """Compiles what calls would have used. Where the child can compile several at once, it does: each of them then finds what
    it needs in the cache. One that spoils that is found when it is compiled by itself."""
    if len(jobs) > 1 and child.start():
        try:
            if (request := compile_jobs.together(job[1:] for job in jobs)) is not None:
                child.compile(f"{len(jobs)} kernels", **request)
        except _ProgramEnds:
            raise
        except Exception as error:  # noqa: BLE001
            # Each is tried by itself now, and what is wrong with it is said then.
            _log(logging.INFO, "not_compiled_in_child", f"{len(jobs)} kernels", error)
    for number, kernel, call, device in jobs:
        if not stopped():
            _compile(number, kernel, call, device, child)


def _compile_in(child: CompileChild, kernel: str, call: str, device: int) -> float:
    """Has the child compile a kernel, if it can: the milliseconds that took there. Raises where the child was lost over it:
    what kills one process is not tried in this one."""
    if not compile_jobs.can(kernel, call, device) or not child.start():
        return 0.0
    try:
        # It starts while this is found out.
        job = compile_jobs.job(kernel, call, device)
        return child.compile(kernel, **job) if job is not None else 0.0
    except (UnavailableError, NotCompiledError) as error:
        # This process is the one that has to run it: what it says counts.
        _log(logging.INFO, "not_compiled_in_child", kernel, error)
        return 0.0
    except ChildError as error:
        _log(logging.WARNING, "compile_child_lost", kernel, error)
        raise


def _log(level: int, event: str, kernel: str, error: Exception) -> None:
    text = f"{kernel} was not compiled in the background: {error}"
    events.log(event, level, text, to_json({"kernel": kernel, "error": str(error)}), False)


def _tuned(done: list[tuple[str, str]]) -> list[TuneReport]:
    """Measures the calls, where the configuration says so."""
    if not setting("perfdb.auto_tune_on_warmup") or not done:
        return []
    from layerzero.tuning import tune

    by_device: dict[str, list[str]] = {}
    for call, device in done:
        by_device.setdefault(device, []).append(call)
    return [tune(calls=calls, device=device, progress=False) for device, calls in by_device.items()]


_worker = _Worker()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_worker.forked)
