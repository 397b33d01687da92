"""The layouts of calls that do not say theirs, as Python sees them.

A call without ``layout=`` is decided in the native half, by the settings in force where it is made. Some things are done
elsewhere and later: a backward pass, a graph that was compiled. They take the layout along.
"""

from __future__ import annotations

from layerzero import _native

#: The settings, and the layouts they may say.
SETTINGS = {"default_layout": ("BSHD", "BHSD"), "default_cache_layout": ("NHD", "HND")}

#: What was in force when it last changed, by setting. torch's compiler reads this while it traces, and compiles anew
#: when it is another.
SEEN = {"default_layout": "BSHD", "default_cache_layout": "NHD"}


def here(setting: str) -> str:
    """The layout a setting says for the calls made here."""
    return dict(zip(SETTINGS, _native.default_layouts(True), strict=True))[setting]


def look(said: dict[str, str] | None = None) -> None:
    """Takes note of the layouts in force: what blocks say, and what the process does."""
    SEEN.update(zip(SETTINGS, _native.default_layouts(False), strict=True))
    SEEN.update(said or {})


def setting_of(layout: str) -> str | None:
    """The setting that may say a layout."""
    return next((setting for setting, known in SETTINGS.items() if layout in known), None)
