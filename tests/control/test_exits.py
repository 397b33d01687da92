"""A process ends as its program says: every status is the program's, nothing else is printed, no thread is in the way."""

from __future__ import annotations

import json
import os
from pathlib import Path

from exiting import ENDS
from processes import SUPPORT, python

#: How many programs end, by LZ_TEST_SCALE.
EXITS = {"smoke": 5, "quick": 8, "full": 1000}[os.environ.get("LZ_TEST_SCALE", "quick")]


def test_programs_end_as_they_say(tmp_path: Path) -> None:
    done = python(
        "-W",
        "ignore::DeprecationWarning",
        SUPPORT / "exiting.py",
        str(EXITS),
        "20",
        str(tmp_path),
        timeout=3600,
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == EXITS, f"{done.returncode}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    for program in told:
        printed = program["printed"].strip().splitlines()
        if program["end"] == "raise":
            assert printed and printed[-1] == "ValueError: the program's own", program
            printed = [
                line for line in printed if not line.startswith(("Traceback", " ", "ValueError: the program's own"))
            ]
        assert (program["status"], printed) == (ENDS[program["end"]], []), program
