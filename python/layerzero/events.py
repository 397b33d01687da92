"""What happens, through Python's logging: the logger ``layerzero``, one record per event."""

from __future__ import annotations

import json
import logging

logger = logging.getLogger("layerzero")
# Who does not ask for the log gets the warnings alone.
logger.addHandler(logging.NullHandler())


def log(name: str, level: int, text: str, fields: str) -> None:
    """Logs an event; its fields are in the record as ``layerzero``, its name as ``event``."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", text, extra={"event": name, "layerzero": json.loads(fields)})
