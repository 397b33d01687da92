"""A library that an adapter calls. It is imported when one of its kernels is about to run, and only then; whether it is
installed is known before, from its metadata (`layerzero.detection`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from typing import Any

from layerzero.compat.builds import distribution_name

# What the import of a library raises that does not fit the torch, the CUDA or the compiler here.
_MISFITS = (ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError, AssertionError)


class Library:
    """A library: its modules, and what must be in them. After :meth:`find` all of that are attributes of this object.

    Args:
        name: what is imported.
        functions: what must be in the module of that name.
        modules: other modules, each with what must be in it. Without ``functions``, the module ``name`` is not looked at.
        own_version: whether the version is the module's ``__version__``. Otherwise it is that of the metadata; where there
            are none, the module's own, then ``usual_version``.
        usual_version: the version of a build that does not say one.
        advice: what to do if something is missing.
    """

    def __init__(
        self,
        name: str,
        *functions: str,
        modules: Mapping[str, Sequence[str]] | None = None,
        own_version: bool = False,
        usual_version: str | None = None,
        advice: str = "",
    ) -> None:
        self.name = name
        own = {name: functions} if functions or not modules else {}
        self._modules: dict[str, Sequence[str]] = {**own, **(modules or {})}
        self._own_version = own_version
        self._usual_version = usual_version
        self._advice = f"; {advice}" if advice else ""

    def find(self) -> str:
        """Imports the library and gives its version. Raises `ImportError`, in one line, where it, a module or a function is
        missing."""
        imported: dict[str, Any] = {}
        found: dict[str, Any] = {}
        for module in self._modules:
            try:
                imported[module] = import_module(module)
            except _MISFITS as error:
                raise ImportError(f"{module} cannot be imported: {' '.join(str(error).split())}") from error
        version = self._version(next(iter(imported.values())))
        for module, names in self._modules.items():
            missing = [name for name in names if not hasattr(imported[module], name)]
            if missing:
                known = f" {version}" if version else ""
                raise ImportError(f"{module}{known} has no {', '.join(missing)}{self._advice}")
            found.update((name, getattr(imported[module], name)) for name in names)
        vars(self).update(found)
        return version or self.installed()

    def installed(self) -> str:
        """The version by its metadata, without importing it. Raises `ImportError` where it is not installed."""
        distribution = distribution_name(self.name)
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError as error:
            raise ImportError(f"{distribution} is not installed") from error

    def _version(self, module: Any) -> str | None:
        own = getattr(module, "__version__", None)
        if self._own_version and own is not None:
            return str(own)
        try:
            return self.installed()
        except ImportError:
            return str(own) if own is not None else self._usual_version

    def __getattr__(self, name: str) -> Any:
        # Only for what is not there: `find` sets attributes.
        raise AttributeError(f"{self.name} was not imported yet, or {name} is not among what it must have", name=name)
