"""Loading of backends and plugins: once, lazily, and so that a broken one disturbs nobody."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerzero import _native
from layerzero.errors import ConfigurationError, warn
from layerzero.lifecycle import taken_around_forks

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: The entry point group of third-party backends.
GROUP = "layerzero.backends"

# A child that finds loading half done would wait for a thread it does not have: for its imports, too.
_lock = taken_around_forks(threading.RLock())
_loaded = False


def load() -> None:
    """Loads every backend and plugin. Later calls do nothing; nothing here raises because a library is missing."""
    global _loaded
    with _lock:
        if _loaded:
            return
        # What the operator wants comes first: a file with a mistake must not be passed over.
        _native.load_sources()
        configuration = json.loads(_native.settings())
        for warning in configuration["warnings"]:
            warn(warning)
        if configuration["files"]:
            from layerzero.control import reload_on_hang_up

            reload_on_hang_up()
        # Registering kernels must not load again.
        _loaded = True
        from importlib.metadata import entry_points

        from layerzero.backends import BACKENDS

        for name in BACKENDS:
            _load_builtin(name)
        for entry in entry_points(group=GROUP):
            _load_plugin(entry)
        # Only now is it known which kernels the measurements are of.
        _native.learn()
        _native.load_warm()
        for warning in _native.pin_warnings():
            warn(warning)


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
    global _loaded
    with _lock:
        _loaded = True


def _load_builtin(name: str) -> None:
    folder = Path(__file__).parent / "backends" / name
    document = (folder / "capabilities.json").read_text(encoding="utf-8")
    from layerzero.compat import problem

    if (why := problem(name)) is not None:
        _native.load_backend(name, document, {}, [], ("BACKEND_IMPORT_FAILED", why), "built_in")
        return
    import_backend(name, document)


def import_backend(name: str, document: str) -> None:
    """Imports the adapter of a backend that comes along, and registers its kernels, or why they cannot run."""
    try:
        adapter = importlib.import_module(f"layerzero.backends.{name}.adapter")
        version = adapter.detect()
    except Exception as error:
        library = json.loads(document).get("import_name", name)
        _native.load_backend(name, document, {}, [], _why_not(library, error), "built_in")
        return
    _register(document, adapter.KERNELS, version, "built_in")


def _why_not(library: str, error: Exception) -> tuple[str, str]:
    if isinstance(error, ImportError) and not _is_installed(library):
        return ("NOT_INSTALLED", library)
    return ("BACKEND_IMPORT_FAILED", _one_line(error))


def _one_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _load_plugin(entry: EntryPoint) -> None:
    before = _registered()
    try:
        entry.load()()
    except (Exception, SystemExit) as error:
        why = _one_line(error)
        for kernel in _registered() - before:
            _native.unregister(kernel)
        warn(f"the plugin '{entry.name}' ({entry.value}) is disabled: {why}")
        _native.disable(entry.name, why)


def _registered() -> set[str]:
    return {f"{k['kernel_id']}@{k['version']}" for k in json.loads(_native.list_kernels())}


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
) -> None:
    """Registers a backend: its capabilities document (JSON or YAML text, a path, or data) and a function per kernel.

    A function takes the operation's arguments by their schema names, in any order, and only those it uses. ``version``,
    when given, replaces the document's ``backend_version``: the version that was found. ``trusted``: you vouch for its
    kernels, and they serve without being compared with the reference; a document cannot say that of itself.
    """
    _register(capabilities, kernels, version, "vouched" if trusted else "unproven")


def _register(
    capabilities: str | Path | Mapping[str, Any],
    kernels: Mapping[str, Callable[..., Any]],
    version: str | None,
    trust: str,
) -> None:
    if isinstance(capabilities, Mapping):
        text = json.dumps(capabilities)
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
    _native.load_backend(name, text, versions, adapters, None, trust)
