"""Text for terminals: what comes from names, files and the environment must not steer one."""

from __future__ import annotations

import re

# Every control character but the tab and the new line, as the command line has it.
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    r"""The text with its control characters shown (``\x1b``), but for new lines and tabs."""
    return _HIDDEN.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
