"""What an operator decides: settings, forced kernels, preferences for a while; and how the process is doing.

Later ones win: defaults, the user's file, the project's file, the environment, code, a ``with`` block, the call itself.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import ContextDecorator
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from layerzero import _native, fingerprints, layouts, loading
from layerzero.printing import visible
from layerzero.results import Result, Rows, Table, cell, rows


def configure(**settings: Any) -> None:
    """Sets settings for this process, all or none.

    Sections are given as dicts (``breaker={"failure_threshold": 3}``) or with two underscores
    (``breaker__failure_threshold=3``); ``None`` removes a setting. ``layerzero config reference`` lists all of them.
    """
    loading.load()
    _native.configure({name.replace("__", "."): value for name, value in settings.items()})
    look_at_layouts()
    fingerprints.said("configure", sorted(settings.items()))
    reload_on_hang_up()


def load_config(path: str | os.PathLike[str]) -> None:
    """Uses this file as the project's file, instead of ``$LAYERZERO_CONFIG`` or ``./layerzero.yaml``.

    A file with a mistake changes nothing, and the error lists every mistake. If the file says ``watch: true``, it is
    read again whenever it changes.
    """
    loading.load()
    _native.load_config(Path(path))
    look_at_layouts()
    fingerprints.changed()
    reload_on_hang_up()


def reload() -> None:
    """Reads the configuration's files again. If they are refused, the last good configuration stays."""
    loading.load()
    _native.reload()
    look_at_layouts()
    fingerprints.changed()


def reset() -> None:
    """Removes everything that `configure`, `force_kernel` and `unforce_kernel` have set in this process."""
    loading.load()
    _native.reset()
    look_at_layouts()
    fingerprints.forgotten()


def force_kernel(operation: str, kernel_id: str, *, optional: bool = False) -> None:
    """Only this kernel may serve the operation. A call it cannot serve is an error that says why.

    The same as ``locks`` in a configuration file. ``kernel_id`` may also be an alias, a backend, a library, or a glob of
    these. An unknown name is an error. With ``optional`` nothing is forced if the kernel is unknown or cannot run.
    """
    loading.load()
    _native.lock(operation, kernel_id, optional)
    fingerprints.said("lock", operation, kernel_id, optional)


def unforce_kernel(operation: str) -> None:
    """No kernel is forced for the operation any more, whether :func:`force_kernel` or a configuration file did so."""
    loading.load()
    _native.unlock(operation)
    fingerprints.said("unlock", operation)


def reload_on_hang_up() -> None:
    """SIGHUP reloads, as operators expect of a server, unless the program does something else with it."""
    on_main = threading.current_thread() is threading.main_thread()
    if on_main and hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _reload_quietly)


def _reload_quietly(*_: object) -> None:
    from layerzero.errors import LayerZeroError

    try:
        _native.reload()
    except LayerZeroError:
        # It was logged as an event, and is in the health.
        return
    look_at_layouts()
    fingerprints.changed()


class Frame(NamedTuple):
    """A `with` block, or a call of a plan."""

    said: dict[str, Any]
    """The settings it says."""
    plan: _native.Plan | None
    """The plan; held here as long as anybody is inside."""
    overlay: _native.Overlay | None
    """What calls made inside are made in: this one and all around it. Held here as long as anybody is inside."""

    @property
    def number(self) -> int:
        """The overlay's number."""
        return self.overlay.number if self.overlay is not None else 0


#: What is around, the innermost first.
_frames: ContextVar[tuple[Frame, ...]] = ContextVar("layerzero_frames", default=())
_overlay: ContextVar[int] = ContextVar("layerzero_overlay", default=0)


@cache
def _use_variable() -> None:
    _native.use_context_variable(_overlay)


class Context(ContextDecorator):
    """Settings for the calls inside a ``with`` block, or of a decorated function. Can be used again, and nested."""

    def __init__(self, **said: Any) -> None:
        self._said = said

    def __enter__(self) -> None:
        around = _frames.get()
        stand_in((Frame(self._said, None, overlay(self._said, None, around)), *around))

    def __exit__(self, *_: object) -> None:
        stand_in(_frames.get()[1:])


def frames() -> tuple[Frame, ...]:
    """What the calls made here are inside of, the innermost first."""
    return _frames.get()


fingerprints.of_frames(frames)


def stand_in(frames: tuple[Frame, ...]) -> None:
    """From here on calls are made inside of these."""
    before = _frames.get()
    _frames.set(frames)
    _overlay.set(frames[0].number if frames else 0)
    if _layouts_of(frames) != _layouts_of(before):
        look_at_layouts()
    fingerprints.look()


def _layouts_of(frames: tuple[Frame, ...]) -> dict[str, str]:
    """The layouts that blocks say, the innermost first."""
    said: dict[str, str] = {}
    for frame in frames:
        for setting in layouts.SETTINGS:
            if setting in frame.said:
                said.setdefault(setting, frame.said[setting])
    return said


def look_at_layouts() -> None:
    """Lets torch's compiler know which layouts are in force."""
    layouts.look(_layouts_of(_frames.get()))


def leave(entered: Frame, around: tuple[Frame, ...]) -> None:
    """Leaves what was entered, and all that was entered inside of it. What it stands in may not be what was around then:
    see :class:`OpenBlocks`."""
    now = _frames.get()
    at = next((at for at, frame in enumerate(now) if frame.said is entered.said), None)
    stand_in(around if at is None else now[at + 1 :])


class OpenBlocks:
    """The blocks that a generator or a coroutine has entered in one step and leaves in a later one."""

    __slots__ = ("_around", "_blocks")

    def __init__(self) -> None:
        self._blocks: tuple[Frame, ...] = ()
        self._around: tuple[Frame, ...] = ()

    def enter(self, around: tuple[Frame, ...]) -> None:
        """From here on calls are made inside of the blocks, and these inside of what is around now."""
        if self._blocks and around != self._around:
            blocks: tuple[Frame, ...] = ()
            for said, plan, _ in reversed(self._blocks):
                blocks = (Frame(said, plan, overlay(said, plan, blocks + around)), *blocks)
            self._blocks = blocks
        self._around = around
        stand_in(self._blocks + around)

    def keep(self) -> None:
        """Takes note of the blocks that are open."""
        now = _frames.get()
        inner = len(now) - len(self._around)
        self._blocks = now[:inner] if inner > 0 and now[inner:] == self._around else ()


def overlay(said: dict[str, Any], plan: _native.Plan | None, around: tuple[Frame, ...]) -> _native.Overlay:
    """What is said inside of all that is around."""
    loading.load()
    _use_variable()
    plans = dict.fromkeys(p for p in (plan, *(frame.plan for frame in around)) if p is not None)
    return _native.overlay(_merged(said, *(frame.said for frame in around)), list(plans))


def _merged(*frames: dict[str, Any]) -> dict[str, Any]:
    """One layer out of several, the first one said innermost: lists are joined, of all else the first counts."""
    settings: dict[str, Any] = {}
    for name, value in (item for frame in frames for item in frame.items()):
        if isinstance(value, list):
            known = settings.setdefault(name, [])
            known += [v for v in value if v not in known]
        else:
            settings.setdefault(name, value)
    return settings


def prefer(*sources: str) -> Context:
    """``with lz.prefer("flashinfer"):`` prefers libraries for the calls inside, the first one most."""
    return Context(prefer_sources=list(sources))


def avoid(*sources: str) -> Context:
    """``with lz.avoid("xformers"):`` avoids libraries for the calls inside."""
    return Context(avoid_sources=list(sources))


def disabled(*sources: str) -> Context:
    """``with lz.disabled():`` runs references only, for the calls inside; ``with lz.disabled("flashinfer"):`` runs
    everything but these libraries."""
    if sources:
        # What is no name is refused with the settings it would be part of.
        named = [f"disabled {source}" if isinstance(source, str) else "disabled" for source in sources]
        rules = [{"name": name, "deny_sources": [source]} for name, source in zip(named, sources, strict=True)]
        return Context(rules=rules)
    return Context(enabled=False)


def deterministic(on: bool = True) -> Context:
    """``with lz.deterministic():`` runs deterministic kernels only, for the calls inside."""
    return Context(deterministic=on)


def layout(*names: str) -> Context:
    """``with lz.layout("BHSD"):`` says the layout of the calls inside that do not give ``layout=``.

    ``"BSHD"`` or ``"BHSD"`` is for attention and rope, ``"NHD"`` or ``"HND"`` for paged caches; one of each may be given.
    """
    from layerzero.errors import ConfigurationError

    said: dict[str, str] = {}
    for name in names:
        setting = layouts.setting_of(name)
        if setting is None or setting in said:
            known = ", ".join(word for words in layouts.SETTINGS.values() for word in words)
            problem = (
                f"there is no layout {name!r}"
                if setting is None
                else f"{said[setting]!r} and {name!r} exclude each other"
            )
            raise ConfigurationError(f"layout: {problem}", code="BAD_LAYOUT", hint=f"the layouts are {known}")
        said[setting] = name
    if not said:
        raise ConfigurationError(
            "layout: no layout was given", code="BAD_LAYOUT", hint='for instance lz.layout("BHSD")'
        )
    return Context(**said)


@dataclass(frozen=True, slots=True, repr=False)
class Setting(Result):
    """A setting: its key, its value, and where that came from."""

    key: str
    value: Any
    origin: dict[str, Any]


def setting(key: str) -> Any:
    """The value in force of one setting."""
    loading.load()
    return loading.setting(key)


def settings() -> Rows[Setting]:
    """Every setting in force."""
    loading.load()
    entries = json.loads(_native.settings())["entries"]
    return rows((Setting(e["key"], e["value"], e["origin"]) for e in entries), "settings")


@dataclass(frozen=True, slots=True, repr=False)
class Health(Result):
    """The state of the process. ``print`` shows it, ``to_dict`` gives it as data."""

    level: str
    """``full``, ``reduced``, ``cached``, ``rule_based`` or ``minimal``."""
    score: float
    """From 0 to 100, over the last calls."""
    well: bool
    """Whether nothing is out of order."""
    kernels: dict[str, dict[str, Any]]
    """By kernel: calls, failures, fallbacks, times, the last error."""
    breakers: list[dict[str, Any]]
    """By backend and operation."""
    wrong_results: list[dict[str, Any]]
    """Kernels whose results were wrong, and the operations they no longer serve: the call, the error, the tolerance."""
    rollouts: list[dict[str, Any]]
    """Kernels in a rollout."""
    reloads: dict[str, Any]
    """Configurations taken over and refused, and why the last one was."""
    jit: dict[str, Any]
    """Kernels that are compiled on first use: warm, cold, queued, dropped, failed, and the ``compiler``: who compiles in the
    background (``by``: ``child``, ``thread`` or ``nobody``), ``why`` that is no child, children ``lost``."""
    perfdb: dict[str, Any]
    """The performance database: where, in what state, how many measurements count."""
    drifted: list[dict[str, Any]]
    """Kernels whose sampled calls take longer than was measured: ``kernel``, ``call``, ``live_us``, ``measured_us``."""
    events: list[dict[str, Any]]
    """What happened last, the newest last."""
    _text: str
    _data: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """All of it, as data."""
        return self._data

    def __str__(self) -> str:
        return visible(self._text)

    def _table(self) -> Table:
        state = "nothing is out of order" if self.well else "something is out of order"
        names = ("kernel", "calls", "failures", "fallbacks", "last_error")
        served = [[cell(kernel.get(name)) for name in names] for kernel in self.kernels.values()]
        notes = [f"circuit: {cell(breaker)}" for breaker in self.breakers]
        return Table(f"level {self.level}, score {self.score:g}: {state}", names, served, notes)


def health() -> Health:
    """The state of the process: level, breakers, counters per kernel, rollouts, reloads, events."""
    from layerzero.warm_up import compiler

    text, table, well = _native.health()
    data = json.loads(text)
    by = compiler()
    data["jit"]["compiler"] = asdict(by)
    if by.why or by.lost:
        table = f"{table.rstrip()}\n{by}\n"
    return Health(
        level=data["level"],
        score=data["score"],
        well=well,
        kernels={k["kernel"]: k for k in data["kernels"]},
        breakers=data["breakers"],
        wrong_results=data["wrong_results"],
        rollouts=data["rollouts"],
        reloads=data["reloads"],
        jit=data["jit"],
        perfdb=data["perfdb"],
        drifted=data["drifted"],
        events=data["events"],
        _text=table,
        _data=data,
    )


@dataclass(frozen=True, slots=True, repr=False)
class Check(Result):
    """One of the checks of :func:`readiness_check`."""

    name: str
    status: str
    """``pass``, ``warn``, ``fail`` or ``skipped``."""
    detail: str
    hint: str


@dataclass(frozen=True, slots=True, repr=False)
class Readiness(Result):
    """Whether the process is ready for production. ``print`` shows it, ``to_dict`` gives it as data."""

    ready: bool
    checks: Rows[Check]
    _text: str
    _data: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """All of it, as data."""
        return self._data

    def __str__(self) -> str:
        return visible(self._text)

    def __bool__(self) -> bool:
        return self.ready

    def _table(self) -> Table:
        found = [(check.name, check.status, check.detail, check.hint) for check in self.checks]
        return Table("ready" if self.ready else "not ready", ("check", "status", "detail", "hint"), found)


def readiness_check() -> Readiness:
    """Checks whether the process is ready for production: configuration, capabilities, references, locks, memory, circuits, rollouts.

    ``layerzero ready`` is the same as a command, a gate with an exit code.
    """
    text, table, ready = _native.readiness()
    data = json.loads(text)
    checks = (Check(c["name"], c["status"], c["detail"], c["hint"]) for c in data["checks"])
    return Readiness(ready=ready, checks=rows(checks, "checks"), _text=table, _data=data)


def forget_failures() -> None:
    """Closes every circuit and lifts every restriction, as if nothing had failed. Kernels that this process found wrong
    are compared with the reference again before they serve. A library that lost its CUDA context stays out: only a new
    process brings it back."""
    _native.forget_failures()


def restart_rollout(rollout: str) -> None:
    """Gives a rollout that was rolled back its share of the calls again: do so when its kernel is fixed."""
    from layerzero.errors import ConfigurationError

    if not _native.rearm(rollout):
        known = ", ".join(r["spec"]["name"] for r in health().rollouts) or "none"
        raise ConfigurationError(
            f"there is no rollout '{rollout}'; there are: {known}", code="UNKNOWN_ROLLOUT", hint="see lz.health()"
        )
