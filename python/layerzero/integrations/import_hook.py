"""Callbacks for when a module is imported, now or later, without importing it."""

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib import _bootstrap
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from layerzero.lifecycle import open_in_forks

Callback = Callable[[], None]

_LOCK = open_in_forks(threading.Lock())


def after_import(name: str, callback: Callback) -> None:
    """Calls `callback` once, right after module `name` has been imported; at once if it is already.

    A callback that fails does not fail the import: it becomes a warning.
    """
    with _LOCK:
        _FINDER.waiting.setdefault(name, []).append(callback)
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
    # A thread that looked for the module before the finder was there holds its lock until it is imported.
    _bootstrap._lock_unlock_module(name)  # type: ignore[attr-defined]
    if sys.modules.get(name) is not None:
        _run(name)


def _run(name: str) -> None:
    with _LOCK:
        callbacks = _FINDER.waiting.pop(name, [])
        if not _FINDER.waiting and _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)
    for callback in callbacks:
        try:
            callback()
        except Exception as error:
            text = f"LayerZero could not set itself up for {name}: {type(error).__name__}: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


class _Finder(MetaPathFinder):
    """Finds what the other finders find, with a loader that tells when it is done."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callback]] = {}
        # Names being looked for, per thread: another finder like this one may ask back.
        self._asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        asking: set[str] = self._asking.__dict__.setdefault("names", set())
        if fullname in asking:
            return None
        asking.add(fullname)
        try:
            spec = _find(fullname, path, target)
        finally:
            asking.discard(fullname)
        if spec is not None and hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, _Loader):
            spec.loader = _Loader(spec.loader)
        return spec


def _find(fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if finder is _FINDER or find is None else find(fullname, path, target)
        if spec is not None:
            return spec
    return None


class _Loader(Loader):
    """Loads as the real loader does, then runs the callbacks. The module never sees it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        # For those who only look: a loader can be asked for sources, resources and more.
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _run(module.__name__)


_FINDER = _Finder()
