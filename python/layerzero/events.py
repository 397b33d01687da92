"""What happens, through Python's logging: the logger ``layerzero``, one record per event.

With the setting ``verbose`` events are printed to standard error as well, unless the program gave the logger a handler of
its own.
"""

from __future__ import annotations

import json
import logging
import sys

logger = logging.getLogger("layerzero")
# Who does not ask for the log gets the warnings alone.
logger.addHandler(logging.NullHandler())


def log(name: str, level: int, text: str, fields: str, verbose: bool) -> None:
    """Logs an event; its fields are in the record as ``layerzero``, its name as ``event``. ``verbose``: it is printed."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", text, extra={"event": name, "layerzero": json.loads(fields)})
    if verbose and not _is_handled(level) and sys.stderr is not None:
        print(f"layerzero: {text}", file=sys.stderr)


def _is_handled(level: int) -> bool:
    """Whether the program handles such records of this logger by itself."""
    own = any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    return own and logger.isEnabledFor(level)
