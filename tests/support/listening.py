"""What the package logs, as it comes."""

from __future__ import annotations

import logging
import queue
from typing import Any

#: How long anything that is waited for may take before a test fails, in seconds.
PATIENCE = 30


class Listening(logging.Handler):
    """Everything the package logs, as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.records: queue.Queue[Any] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.put(record)

    def __enter__(self) -> queue.Queue[Any]:
        logger = logging.getLogger("layerzero")
        self.before = logger.level
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        return self.records

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("layerzero")
        logger.removeHandler(self)
        logger.setLevel(self.before)


def listening() -> Listening:
    """Hears what is logged inside."""
    return Listening()


def wait_for(heard: queue.Queue[Any], event: str) -> Any:
    """The next event of that name."""
    while True:
        record = heard.get(timeout=PATIENCE)
        if record.event == event:
            return record
