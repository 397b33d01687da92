"""For `make docs`: a function of the stubs that has only overloads is a function, with the docstring of the first of them.

griffe, which reads the stubs, keeps overloads apart and adds them to the function that follows them. In a stub file none follows.
"""

from __future__ import annotations

from typing import Any

from griffe import Extension, Module  # type: ignore[import-not-found]  # only in the environment of `make docs`


class Overloads(Extension):  # type: ignore[misc]
    """Makes a member of each such function."""

    def on_module_members(self, *, mod: Module, **_: Any) -> None:
        """See `griffe.Extension`: all members of a module were read."""
        for name, overloads in list(mod.overloads.items()):
            if overloads and name not in mod.members:
                first = overloads[0]
                first.overloads = overloads[1:]
                mod.set_member(name, first)
                del mod.overloads[name]
