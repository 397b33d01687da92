"""Every kernel of plain torch for any device, over the cases of testdata/, on tensors of a device that is none torch knows.

Run as a program: prints a JSON object of what is wrong, by kernel and case, and how many cases there were.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import adapter_cases
import open_device


def main(built: str) -> None:
    """Runs them all."""
    warnings.simplefilter("ignore")
    open_device.open_up(Path(built))
    wrong: dict[str, Any] = {}
    ran: dict[str, int] = {}
    for kernel in adapter_cases.kernels("torch_any"):
        for case in (case for op in kernel.ops for case in adapter_cases.cases(op)):
            if case.expect is None or adapter_cases.reason_to_skip(kernel, case):
                continue
            ran[kernel.id] = ran.get(kernel.id, 0) + 1
            try:
                problems = adapter_cases.run(kernel, case, place=f"{open_device.NAME}:1")
            except Exception as error:  # noqa: BLE001 - what a kernel raises is what is wrong
                problems = [f"{type(error).__name__}: {str(error)[:200]}"]
            if problems:
                wrong[f"{kernel.id} {case.op} {case.name}"] = problems
    print(json.dumps({"wrong": wrong, "ran": ran}))


if __name__ == "__main__":
    main(sys.argv[1])
