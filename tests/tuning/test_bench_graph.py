"""`layerzero bench graph`: whom peers are compared with, and peers that end."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from layerzero.bench import graph


class Peer:
    """A fake worker: its time, and how many timings it answers before it fails."""

    def __init__(self, peer: str, us: float, timings: int = 1000) -> None:
        self.peer, self.us, self.left = peer, us, timings

    def ask(self, line: str) -> dict[str, Any]:
        command, _, rest = line.partition(" ")
        if command == "result":
            torch.save(torch.tensor([self.us]), rest)
        if command == "time":
            self.left -= 1
            if self.left < 0:
                return {"error": "the process ended"}
        return {"times_us": [self.us] * 3}


def row(peers: Sequence[Peer]) -> dict[str, Any]:
    found: dict[str, Any] = graph._row("case", 0, peers, 5, 0.0)  # type: ignore[arg-type]
    return found["peers"]  # type: ignore[no-any-return]


def test_times_are_divided_by_those_of_eager_torch_wherever_it_stands() -> None:
    found = row([Peer("layerzero", 2.0), Peer("openvino", 3.0), Peer("eager", 8.0)])
    assert {name: one["of_eager"] for name, one in found.items()} == {
        "layerzero": 0.25,
        "openvino": 0.375,
        "eager": 1.0,
    }
    assert {name: one["largest_difference"] for name, one in found.items()} == {
        "layerzero": 6.0,
        "openvino": 5.0,
        "eager": 0.0,
    }
    found = row([Peer("openvino", 3.0), Peer("layerzero", 6.0)])
    assert found["layerzero"]["of_eager"] == 2.0


@pytest.mark.parametrize("timings", [0, 2])
def test_a_peer_that_ends_loses_its_row_only(timings: int) -> None:
    found = row([Peer("eager", 4.0), Peer("openvino", 1.0, timings), Peer("layerzero", 2.0)])
    assert found["openvino"] == {"error": "the process ended"}
    assert found["layerzero"]["of_eager"] == 0.5
    found = row([Peer("eager", 4.0, timings), Peer("layerzero", 2.0)])
    assert found["layerzero"]["us"] == 2.0
    assert "of_eager" not in found["layerzero"]


def test_a_process_that_ends_in_the_middle_of_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import sys; sys.stdin.readline(); sys.stdout.write('{\"times_us\": [1'); sys.stdout.flush()")
    popen = graph.subprocess.Popen
    monkeypatch.setattr(graph.subprocess, "Popen", lambda _, **how: popen([sys.executable, str(script)], **how))
    worker = graph.Worker("eager", 1)
    for _ in range(2):
        assert worker.ask("time 1") == {"error": "the process ended"}
    worker.close()
    assert not worker.runs()
    assert json.dumps(row([Peer("eager", 1.0)]))
