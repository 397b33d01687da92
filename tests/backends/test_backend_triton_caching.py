"""Our Triton kernel that writes to a paged cache, against a loop over the tokens."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import SUPPORT, forked

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

PAGES, SIZE = 5, 4


def wrong_writes(device: str, rounds: int) -> list[str]:
    """Random calls whose caches are not what a loop makes of them: padding, slots given twice, both layouts, views."""
    append = import_module("layerzero.backends.triton.caching").KERNELS["triton.kv_append"]
    wrong = []
    for number in range(rounds):
        make = np.random.default_rng(number)
        tokens, heads, dim = int(make.integers(1, 9)), int(make.integers(1, 4)), int(make.integers(1, 20))
        dtype = (torch.float32, torch.float16, torch.bfloat16)[number % 3]
        layout = ("NHD", "HND")[number % 2]
        slots = make.integers(-2, PAGES * SIZE, tokens)
        slots[make.random(tokens) < 0.3] = slots[0]
        shape = (PAGES, SIZE, heads, dim) if layout == "NHD" else (PAGES, heads, SIZE, dim)
        new = torch.from_numpy(make.standard_normal((2, heads, tokens, dim))).to(dtype).transpose(1, 2)
        caches = torch.from_numpy(make.standard_normal((2, *shape))).to(dtype)
        want = caches.clone()
        for token, slot in enumerate(slots):
            if slot >= 0:
                page, place = divmod(int(slot), SIZE)
                view = want[:, page, place] if layout == "NHD" else want[:, page, :, place]
                view.copy_(new[:, token])
        got = caches.to(device)
        mapping = torch.from_numpy(slots).to(device, (torch.int64, torch.int32)[number % 5 == 0])
        append(*new.to(device), *got, mapping, layout)
        if not torch.equal(got.cpu(), want):
            wrong.append(f"{number}: {layout} {dtype} slots {slots.tolist()}")
    return wrong


def test_the_interpreter_writes_what_a_loop_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = "import interpreting, test_backend_triton_caching as t\ninterpreting.interpret()\nanswer(t.wrong_writes('cpu', 60))"
    assert forked(code, path=[Path(__file__).parent, SUPPORT]) == []


def test_a_device_writes_what_a_loop_writes() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert wrong_writes("cuda", 300) == []
