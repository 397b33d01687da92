"""FlashAttention 2, 3 and 4 as if they were installed: what the tests of these backends share."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from typing import Any

import described
import fake_flash_attn as fakes
import pytest
from attention_calls import Paged, Varlen
from described import SM, adapter, takes

VERSIONS = {"flash_attn": "2.8.3", "flash_attn_3": "3.0.0b1", "flash_attn_4": "4.0.0b27"}
FAKES: dict[str, Any] = {
    "flash_attn": fakes.FlashAttention2,
    "flash_attn_3": fakes.FlashAttention3,
    "flash_attn_4": fakes.FlashAttention4,
}
MODULES = {"flash_attn": "flash_attn", "flash_attn_3": "flash_attn_interface", "flash_attn_4": "flash_attn.cute"}
DEVICES = {"flash_attn": ("a100", "h100", "b200"), "flash_attn_3": ("h100",), "flash_attn_4": ("a100", "h100", "b200")}
PREFIX = {"flash_attn": "flash_attn.v2", "flash_attn_3": "flash_attn.v3", "flash_attn_4": "flash_attn.v4"}
backends = pytest.mark.parametrize("backend", list(VERSIONS))


@contextmanager
def all_registered() -> Iterator[None]:
    """All three, as if they were installed."""
    with ExitStack() as stack:
        for backend, version in VERSIONS.items():
            stack.enter_context(described.registered(backend, version))
        stack.enter_context(described.registered("flash_attn_4_pages", VERSIONS["flash_attn_4"]))
        yield


def install(monkeypatch: pytest.MonkeyPatch, backend: str, fake: Any = None) -> Any:
    """Puts a library in place and has the adapter find it."""
    fake = fake or FAKES[backend]()
    name = MODULES[backend]
    monkeypatch.setitem(sys.modules, name, fake.module())
    if backend == "flash_attn_4":
        monkeypatch.setitem(sys.modules, "flash_attn", type(sys)("flash_attn"))
    monkeypatch.setattr(metadata, "version", lambda _: VERSIONS[backend])
    assert adapter(backend).detect() == VERSIONS[backend]
    return fake


def kernel(backend: str, name: str) -> Any:
    """A kernel's function."""
    return kernels(backend)[name]


def ran_right(fake: Any, backend: str, calls: Iterable[Paged] | Iterable[Varlen]) -> dict[str, int]:
    """Runs every kernel that the engine lets a call through to, and checks its result. How many calls each of them had."""
    ran: dict[str, int] = {}
    for call in calls:
        device = DEVICES[backend][0] if backend != "flash_attn_4" else "h100"
        fake.sm = SM[device]
        for name in takes(call.ask(device), PREFIX[backend]):
            tensors = call.tensors()
            function = kernel(backend, name)
            call.check(function(**call.arguments(function, tensors)), call.expected(tensors))
            ran[name] = ran.get(name, 0) + 1
    return ran


def kernels(backend: str) -> dict[str, Any]:
    """All kernels of a library; those of the fourth for pages are not loaded."""
    more = adapter("flash_attn_4_pages").KERNELS if backend == "flash_attn_4" else {}
    return {**adapter(backend).KERNELS, **more}
