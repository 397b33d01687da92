"""Free memory: what torch's allocator holds of it, and kernels whose workspace it has to hold."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import layerzero as lz
import pytest
import torch
from described import FOLDER
from layerzero import _native, memory

MIB = 1 << 20


class Allocator:
    """torch's functions about a GPU's memory, with figures of our own; remembers which were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, allocated: int) -> None:
        self.free, self.reserved, self.allocated = free, reserved, allocated
        self.backend, self.segments, self.asked = "native", [], []  # type: ignore[var-annotated]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: self.backend)
        for name in ("memory_stats", "mem_get_info", "memory_snapshot"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def memory_stats(self, index: int) -> dict[str, int]:
        self.asked.append(("memory_stats", index))
        return {"reserved_bytes.all.current": self.reserved, "allocated_bytes.all.current": self.allocated}

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self.asked.append(("mem_get_info", index))
        return self.free, 141 * 1024 * MIB

    def memory_snapshot(self) -> list[dict[str, Any]]:
        self.asked.append(("memory_snapshot", -1))
        return self.segments

    def segment(self, *blocks: tuple[int, str], device: int = 0, pool: tuple[int, int] = (0, 0)) -> None:
        listed = [{"size": size, "state": state} for size, state in blocks]
        self.segments.append({"device": device, "segment_pool_id": pool, "blocks": listed})


def test_what_torch_holds_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = Allocator(monkeypatch, free=700, reserved=1000, allocated=400)
    assert memory.held(1) == (700, 600, 600)
    # No block of the cache is larger than what the driver has: the list of blocks is not made.
    assert [name for name, _ in torchs.asked] == ["memory_stats", "mem_get_info"]


def test_the_largest_block_is_looked_for_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = Allocator(monkeypatch, free=100, reserved=2000, allocated=500)
    torchs.segment((300, "inactive"), (500, "active_allocated"), (450, "inactive"))
    # Neither another device's, nor what belongs to a captured graph, nor what is about to be freed.
    torchs.segment((900, "inactive"), device=1)
    torchs.segment((800, "inactive"), pool=(0, 1))
    torchs.segment((700, "active_pending_free"))
    assert memory.held(1) == (100, 1500, 450)
    assert ("memory_snapshot", -1) in torchs.asked
    torchs.segments = []
    assert memory.held(1) == (100, 1500, 0)
    # CUDA's own pool has no blocks.
    torchs.backend = "cudaMallocAsync"
    assert memory.held(1) == (100, 1500, 1500)


def test_a_device_torch_has_not_used_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = Allocator(monkeypatch, free=700, reserved=0, allocated=0)
    assert memory.held(3) is None and torchs.asked == [("memory_stats", 2)], "no context is made on it"
    assert memory.held(0) is None, "the host is none of torch's"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert memory.held(1) is None and len(torchs.asked) == 1


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int]]]:
    """What is told of the host's memory: the last of the list, in bytes."""
    figures = [(64 << 30, 0, 0)]
    monkeypatch.setattr(memory, "held", lambda device: figures[-1] if device == 0 else None)
    _native.refresh_memory()
    yield figures
    monkeypatch.undo()
    _native.refresh_memory()


def registered(name: str, priority: int, workspace: int, runs: list[str]) -> None:
    def kernel(input: torch.Tensor, eps: float) -> torch.Tensor:
        runs.append(name)
        return input * torch.rsqrt(input.square().mean(-1, keepdim=True) + eps)

    lz.register_kernel(
        operation="norm.rms",
        kernel_id=name,
        platform="cpu",
        supported_dtypes=["float32"],
        priority=priority,
        trusted=True,
        workspace_bytes=str(workspace),
    )(kernel)


def test_a_remembered_call_does_not_outlive_its_workspace(host: list[tuple[int, int, int]]) -> None:
    runs: list[str] = []
    registered("large.rms", 99, 500 * MIB, runs)
    registered("small.rms", 98, 0, runs)
    x = torch.randn(3, 8)
    expected = (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)).float()

    def served() -> str:
        torch.testing.assert_close(lz.rms_norm(x), expected)
        return runs[-1]

    try:
        assert [served() for _ in range(3)] == ["large.rms"] * 3
        # 1.2 GiB are free, 1 GiB must stay so: 200 MiB are left for a workspace.
        host.append((1200 * MIB, 0, 0))
        _native.refresh_memory()
        assert [served() for _ in range(3)] == ["small.rms"] * 3
        # The same and 700 MiB in the cache of an allocator, in pieces that are too small, then in one.
        host.append((450 * MIB, 1450 * MIB, 400 * MIB))
        _native.refresh_memory()
        assert served() == "small.rms"
        host.append((400 * MIB, 1500 * MIB, 600 * MIB))
        _native.refresh_memory()
        assert [served() for _ in range(3)] == ["large.rms"] * 3
        explained = lz.explain("rms_norm", x)
        assert explained.available_bytes == 600 * MIB
        workspaces = {c.kernel_id: c.workspace_bytes for c in explained.candidates}
        assert workspaces["large.rms"] == 500 * MIB and workspaces["small.rms"] == 0
        assert "629.15 MB available for a workspace" in str(explained)
    finally:
        lz.unregister_kernel("large.rms")
        lz.unregister_kernel("small.rms")


def test_memory_is_looked_at_by_a_call_only_when_it_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def told(device: int) -> None:
        threads.append(threading.get_ident())

    monkeypatch.setattr(memory, "held", told)
    x, failing = torch.randn(4, 8), [True]

    def kernel(input: torch.Tensor, eps: float) -> torch.Tensor:
        if failing[0]:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return input * torch.rsqrt(input.square().mean(-1, keepdim=True) + eps)

    lz.register_kernel(
        operation="norm.rms",
        kernel_id="full.rms",
        platform="cpu",
        supported_dtypes=["float32"],
        priority=99,
        trusted=True,
    )(kernel)
    try:
        with lz.prefer("full"), pytest.warns(lz.errors.LayerZeroWarning, match="out of memory"):
            lz.rms_norm(x)
        assert threads == [threading.get_ident()]
        failing[0] = False
        with lz.prefer("full"):
            for _ in range(200):
                lz.rms_norm(x)
        assert threads.count(threading.get_ident()) == 1
    finally:
        lz.unregister_kernel("full.rms")


def test_every_kernel_for_a_gpu_says_how_much_workspace_it_takes() -> None:
    silent, told = [], 0
    for path in sorted(FOLDER.glob("**/capabilities.json")):
        document = json.loads(path.read_text())
        platforms = document["platform"]
        if platforms in ("cpu", ["cpu"]):
            continue
        for kernels in document["ops"].values():
            told += len(kernels)
            silent += [kernel["kernel_id"] for kernel in kernels if "workspace_bytes" not in kernel]
    assert silent == [] and told > 200
