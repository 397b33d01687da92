"""Loading of backends and plugins: once, lazily, and so that a broken one disturbs nobody."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerzero import _native, backend_files
from layerzero.documents import to_json
from layerzero.errors import ConfigurationError, hold, named_line, warn
from layerzero.lifecycle import taken_around_forks, waited_for

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: The entry point group of third-party backends.
GROUP = "layerzero.backends"

# A child that finds loading half done would wait for a thread it does not have: for its imports, too.
_lock = taken_around_forks(threading.RLock())
# Loading is a list of steps. Each can be done again, and what is done is counted: an interrupted load goes on where it was.
_steps: list[Callable[[], object]] = []
_done = 0
_complete = False
_loading = False
#: Whether everything that the configuration names was found to be known.
_names_known = False
#: Warnings that wait until everything is loaded: where warnings are errors, none must keep the rest from being loaded.
_untold: dict[str, None] = {}
#: By kernel, the backend that loading brought: another process that loads has them, too. Those that the program registers by
#: itself are not among them.
_brought: dict[str, str] = {}
#: What was there before the plugin that is being loaded.
_before: _Before | None = None


def load(*, registering: bool = False) -> bool:
    """Loads every backend and plugin; whether that is complete. Later calls do nothing. A load that was interrupted (by
    Ctrl-C, or by a configuration file with a mistake) is continued by the next call. Nothing here raises because a library
    is missing.

    A configuration may name kernels of plugins and of the program itself. So what it names is checked when all backends
    and plugins are loaded, and not by a program that is still ``registering`` its own kernels.
    """
    if _complete and not _untold and (_names_known or registering):
        return True
    return _load(registering)


# A thread that loads holds a lock that others wait for, so that it must get to the end.
@waited_for
def _load(registering: bool) -> bool:
    global _loading, _names_known
    with _lock:
        if _loading:
            # A plugin that is being loaded calls us.
            return False
        try:
            _loading = True
            hold(_untold)
            with _no_collections():
                _go_on()
        finally:
            _loading = False
            hold(None)
            # Interrupted, what was loaded so far counts.
            _native.settle_changes()
        if not _names_known and not registering:
            _native.settle_names()
            _names_known = True
        _tell()
    return True


@contextmanager
def _no_collections() -> Iterator[None]:
    """Without garbage collections. Reading documents makes thousands of objects, each few hundred of which have Python go
        through all those of torch: half of the time of the first call. The switch is one for all threads: nobody else's code runs under it
    but imports."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _go_on() -> None:
    global _steps, _done, _complete, _before
    if _complete:
        return
    if not _steps:
        _steps = _all_steps()
    while _done < len(_steps):
        if _before is not None and _before.step == _done:
            # It was interrupted in the middle of what it does.
            _before.restore()
        _before = None
        _steps[_done]()
        _done += 1
    _complete = True


def _all_steps() -> list[Callable[[], object]]:
    from importlib.metadata import entry_points

    from layerzero.backends import BACKENDS, UNPROVEN

    return [
        # What the operator wants comes first: a file with a mistake must not be passed over.
        _configure,
        # One state is built for all that comes along, instead of one for each.
        _native.hold_changes,
        *(partial(_load_builtin, name) for name in BACKENDS),
        *(partial(_load_unproven, name) for name in UNPROVEN),
        _native.settle_changes,
        *(partial(_load_plugin, entry) for entry in entry_points(group=GROUP)),
        # Only now is it known which kernels the measurements are of.
        _native.learn,
        _native.load_warm,
        _look_at_files,
    ]


def _configure() -> None:
    _native.load_sources()
    configuration = json.loads(_native.settings())
    for warning in configuration["warnings"]:
        warn(warning)
    if configuration["files"]:
        from layerzero.control import reload_on_hang_up

        reload_on_hang_up()


def _look_at_files() -> None:
    for warning in (*_native.pin_warnings(), *_native.perfdb_warnings()):
        warn(warning)


def _tell() -> None:
    """Gives the warnings that waited. Where warnings are errors all of them are given, and the first is raised."""
    raised: Warning | None = None
    while _untold:
        text = next(iter(_untold))
        del _untold[text]
        try:
            warn(text)
        except Warning as error:
            raised = raised or error
    if raised is not None:
        raise raised


def brought(kernel: str) -> str | None:
    """The backend of a kernel that every process has once it has loaded; ``None`` for one that this program registered."""
    return _brought.get(kernel)


def note_registered(kernels: Iterable[str], backend: str) -> None:
    """Takes note of who registers kernels: loading, or the program itself."""
    for kernel in kernels:
        if _loading:
            _brought[kernel] = backend
        else:
            _brought.pop(kernel, None)


def torch_is_there() -> bool:
    """Whether torch is, or can be, imported."""
    return sys.modules["torch"] is not None if "torch" in sys.modules else _is_installed("torch")


def _is_installed(library: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(library) is not None
    except (ImportError, ValueError):
        # A module that was put out of the way, or stands in `sys.modules` without a specification.
        return False


def nothing() -> None:
    """Has nothing loaded by itself in this process: it is for trying out what is loaded by hand."""
    global _complete, _names_known
    with _lock:
        _complete = _names_known = True


def _load_builtin(name: str) -> None:
    """Registers the kernels of a backend that comes along. torch is imported for that, and no other library: whether one
    is installed is seen without, and importing it may take seconds, print, or fail."""
    from layerzero import detection
    from layerzero.compat import problem

    document = backend_files.text(name)
    library = backend_files.library(name)
    if library == "torch" or detection.is_unlabelled(library):
        if (why := problem(name)) is not None:
            _native.load_backend(name, document, {}, [], ("BACKEND_IMPORT_FAILED", why), "built_in")
        else:
            import_backend(name, document)
        return
    _, _, versions, unavailable = detection.look(name)
    if unavailable is not None:
        _native.load_backend(name, document, {}, [], unavailable, "built_in")
        return
    try:
        package = importlib.import_module(backend_files.package(name))
        if hasattr(package, "check"):
            package.check()
        kernels = importlib.import_module(f"{backend_files.package(name)}.adapter").KERNELS
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _native.load_backend(name, document, {}, [], _why_not(library, error), "built_in")
        return
    _register(document, kernels, versions[name], "built_in", (), partial(_import_library, name))


def _load_unproven(name: str) -> None:
    """As `_load_builtin`, for a backend that was never run on the hardware it is for: only where the configuration names it
    or its library. Where it does not, its kernels are known with that reason, if they could run here otherwise."""
    from layerzero import detection

    document = backend_files.document(name)
    if {name, str(document.get("library", name))} & set(setting("backends.unproven")):
        _load_builtin(name)
    elif detection.look(name)[3] is None:
        _native.load_backend(name, backend_files.text(name), {}, [], ("UNPROVEN", name), "built_in")


def setting(key: str) -> Any:
    """The value of a setting of the process."""
    return _entry(key)["value"]


def path_setting(key: str) -> Path:
    """A setting that is a path; one that is relative is relative to the file that says it."""
    entry = _entry(key)
    path = Path(entry["value"]).expanduser()
    said = entry.get("origin", {}).get("file")
    return path if path.is_absolute() or said is None else Path(said).parent / path


def _entry(key: str) -> dict[str, Any]:
    entries: list[dict[str, Any]] = json.loads(_native.settings())["entries"]
    return next(entry for entry in entries if entry["key"] == key)


#: The functions of kernels that are Python code and come along, by kernel.
FUNCTIONS: dict[str, Callable[..., Any]] = {}

#: Why libraries cannot be used, by backend, as far as that was tried.
_unusable: dict[str, str] = {}


def _import_library(name: str) -> None:
    """Imports the library of a backend whose kernel is about to run. Raises `ImportError` in one line where it cannot be
    used, whatever it raises itself; it is not tried again."""
    from layerzero.interruptions import interruption

    cause: Exception | None = None
    with _lock:
        if name not in _unusable:
            try:
                detect(name)
                return
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                # A signal handler of the caller's may raise anything; that says nothing of the library. One that wants to
                # end the process does not.
                cause = error if isinstance(error, Exception) else None
                if cause is not None and interruption(cause, ()) is not None:
                    raise
                _unusable[name] = named_line(error).removeprefix("ImportError: ")
    raise ImportError(_unusable[name]) from cause


def detect(name: str) -> str:
    """The version of the library of a backend, which is imported for that. Raises where it is missing, or was built for
    another torch or CUDA than there is: then it is not imported."""
    from layerzero.compat import builds

    library = backend_files.library(name)
    if library != "torch" and (other := builds.mismatch(library)) is not None:
        raise RuntimeError(other)
    version: str = importlib.import_module(f"{backend_files.package(name)}.adapter").detect()
    return version


def import_backend(name: str, document: str) -> None:
    """Imports the adapter of a backend that comes along, and registers its kernels, or why they cannot run."""
    try:
        adapter = importlib.import_module(f"{backend_files.package(name)}.adapter")
        version = detect(name)
        lacks = adapter.lacks() if hasattr(adapter, "lacks") else ()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        library = json.loads(document).get("import_name", name)
        _native.load_backend(name, document, {}, [], _why_not(library, error), "built_in")
        return
    _register(document, adapter.KERNELS, version, "built_in", lacks)


def _why_not(library: str, error: BaseException) -> tuple[str, str]:
    if isinstance(error, ImportError) and not _is_installed(library):
        return ("NOT_INSTALLED", library)
    return ("BACKEND_IMPORT_FAILED", named_line(error))


class _Before:
    """Everything a plugin can change, as it was before."""

    def __init__(self, step: int) -> None:
        from layerzero.control import frames
        from layerzero.tokenization.resolving import known

        self.step = step
        self._engine = _native.checkpoint()
        self._frames = frames()
        self._tokenizers = known()

    def restore(self) -> None:
        """Takes back what was changed since. Can be done again."""
        from layerzero.control import stand_in
        from layerzero.tokenization import resolving

        _native.restore(self._engine)
        stand_in(self._frames)
        resolving.restore(self._tokenizers)


def _load_plugin(entry: EntryPoint) -> None:
    global _before
    before = _before = _Before(_done)
    try:
        entry.load()()
    except BaseException as error:
        before.restore()
        if isinstance(error, KeyboardInterrupt):
            raise
        why = named_line(error)
        warn(f"the plugin '{entry.name}' ({entry.value}) is disabled: {why}")
        _native.disable(entry.name, why)


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of a kernel function's arguments, by position.

    A builtin without a signature cannot be asked; wrap it in a function that names what it takes.
    """
    import inspect

    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the arguments of {function!r} cannot be seen: {error}",
            code="BAD_ADAPTER",
            hint="wrap it in a function that names them",
        ) from None
    names = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            raise ConfigurationError(
                f"{function!r} takes '{parameter.name}' by keyword only",
                code="BAD_ADAPTER",
                hint="kernels are called with positional arguments; move it before the '*'",
            )
        names.append(parameter.name)
    return names


def register_backend(
    capabilities: str | Path | Mapping[str, Any],
    kernels: Mapping[str, Callable[..., Any]],
    *,
    version: str | None = None,
    trusted: bool = False,
    lacks: Iterable[str] = (),
) -> None:
    """Registers a backend: its capabilities document (JSON or YAML text, a path, or data) and a function per kernel.

    A function takes the operation's arguments by their schema names, in any order, and only those it uses. ``version``,
    when given, replaces the document's ``backend_version``: the version that was found. ``trusted``: you vouch for its
    kernels, and they serve without being compared with the reference; a document cannot say that of itself. ``lacks``
    names instruction sets that the library does not use in this process although the CPU may have them (it was told not
    to, or cannot): kernels that need one of them are not chosen.
    """
    _register(capabilities, kernels, version, "vouched" if trusted else "unproven", lacks)


def _register(
    capabilities: str | Path | Mapping[str, Any],
    kernels: Mapping[str, Callable[..., Any]],
    version: str | None,
    trust: str,
    lacks: Iterable[str],
    importer: Callable[[], object] | None = None,
) -> None:
    if isinstance(capabilities, Mapping):
        text = to_json(capabilities)
    elif isinstance(capabilities, Path) or "\n" not in capabilities and not capabilities.lstrip().startswith("{"):
        text = Path(capabilities).read_text(encoding="utf-8")
    else:
        text = capabilities
    text = _native.document(text, version)
    data = json.loads(text)
    name = str(data.get("backend", "plugin")) if isinstance(data, dict) else "plugin"
    versions = {name: str(data["backend_version"])} if name != "plugin" and "backend_version" in data else {}
    if (torch := sys.modules.get("torch")) is not None:
        versions["torch"] = torch.__version__
    adapters = [(kernel, function, parameters(function)) for kernel, function in kernels.items()]
    if trust == "built_in":
        FUNCTIONS.update(kernels)
    _native.load_backend(name, text, versions, adapters, None, trust, sorted(lacks), importer)
    note_registered(kernels, name)
