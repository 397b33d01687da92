"""A process that measures one thing at a time, so that a kernel that takes the process with it takes one row with it."""

from __future__ import annotations

import json
import os
import platform
import queue
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

#: What an answer has when nothing more can be asked of the process that gave it.
LOST = "lost"


class Lost(Exception):
    """The process has ended, or did not answer in time."""


class Server:
    """The process, as the one who asks sees it. It is started when it is first asked, and again after it was lost."""

    def __init__(self, db: str, device: str) -> None:
        self._command = [sys.executable, str(Path(__file__)), db, device]
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()
        self.starts = 0

    def ask(self, question: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The answer; one with ``error`` when it could not be had."""
        begun = time.perf_counter()
        try:
            answer = self._asked(question, timeout)
        except (Lost, OSError) as error:
            self.stop()
            answer = {"error": str(error) or type(error).__name__}
        if answer.get(LOST):
            self.stop()
        return {**answer, "took_s": time.perf_counter() - begun}

    def _asked(self, question: dict[str, Any], timeout: float) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise Lost(f"no answer within {timeout:.0f} s") from None
        if line is None:
            raise Lost(f"the process ended with {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[str]:
        self.starts += 1
        self._answers = queue.Queue()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, encoding="utf-8"
        )
        threading.Thread(target=self._listen, args=(self._process, self._answers), daemon=True).start()
        return self._process

    @staticmethod
    def _listen(process: subprocess.Popen[str], answers: queue.Queue[str | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answers.put(line)
        answers.put(None)

    def stop(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            print("a process does not end", file=sys.stderr)


def environment(device: str) -> dict[str, Any]:
    """The machine and the libraries."""
    import layerzero as lz
    import torch
    from layerzero import _native

    lz.list_kernels()
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "gpu": "none",
        "driver": None,
        "python": platform.python_version(),
        "layerzero": lz.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "backends": {},
        "unavailable": {},
    }
    for backend in json.loads(_native.backends()):
        if why := backend.get("unavailable"):
            found["unavailable"][backend["name"]] = str(why["message"]).partition("\n")[0]
        else:
            found["backends"][backend["name"]] = backend["version"]
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["memory_gb"] = round(properties.total_memory / 2**30)
        found["cudnn"] = torch.backends.cudnn.version()
        found["driver"] = _driver()
    return found


def _driver() -> str | None:
    asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def _answer(question: dict[str, Any], device: str) -> dict[str, Any]:
    import layerzero as lz

    if question["do"] == "environment":
        return {"environment": environment(device)}
    if question["do"] == "overhead":
        import overhead

        return {"overhead": overhead.measure(device)}
    how: dict[str, Any] = {
        "calls": [question["call"]],
        "device": device,
        "graph": question["mode"] == "graph",
        "budget": question["budget"],
        "samples": question["samples"],
        "progress": False,
    }
    if question["do"] == "regret":
        return {"regret": lz.regret(**how).to_dict()}
    return {"tune": lz.tune(**how, force=True).to_dict()}


def _settled(device: str) -> str | None:
    """Waits for the device, and gives back much unused memory. What is wrong with it, if something is."""
    if device == "cpu":
        return None
    import torch

    try:
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > 32 << 30:
            torch.cuda.empty_cache()
        torch.zeros(8, device=device).sum().item()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def serve(db: str, device: str, questions: TextIO, answers: TextIO) -> None:
    """Answers one question per line until there are no more, or the device is lost."""
    import layerzero as lz

    lz.configure(perfdb={"path": db})
    for line in questions:
        try:
            answer = _answer(json.loads(line), device)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong is this row's result
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        if lost := _settled(device):
            answer[LOST] = lost
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if lost:
            return


if __name__ == "__main__":
    # Libraries may print; the answers go where they cannot.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.argv[2], sys.stdin, channel)
    # What libraries do at exit is of no use here, and may crash.
    channel.flush()
    os._exit(0)
