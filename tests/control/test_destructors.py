"""Kernels that are Python objects: dropping the last one may run code that calls the engine."""

from __future__ import annotations

import subprocess

import pytest
from processes import python

_CODE = """
import torch, layerzero as lz
lz.configure(verify="off")
x = torch.randn(4, 8)

def register(kernel_id, function):
    options = dict(operation="norm.rms", platform="cpu", supported_dtypes=["float32"], priority=99)
    lz.register_kernel(kernel_id=kernel_id, **options)(function)

class Kernel:
    deleted = 0
    def run(self, input, eps):
        return torch.zeros_like(input)
    def __del__(self):
        Kernel.deleted += 1
        # Changes the engine, and asks it.
        register(f"t.left{{Kernel.deleted}}", lambda input, eps: torch.ones_like(input))
        lz.which("rms_norm", x)

register("t.kernel", Kernel().run)
lz.rms_norm(x)
{drop}
lz.rms_norm(x)
assert Kernel.deleted, "it is still held"
print("served")
"""

WAYS = {
    "unregistered": "lz.unregister_kernel('t.kernel')",
    "unregistered_after_a_block": """
for _ in range(2):
    with lz.prefer("torch"):
        lz.rms_norm(x)
    if not Kernel.deleted:
        lz.unregister_kernel("t.kernel")
""",
    "registered_twice": """
try:
    register("t.kernel", Kernel().run)
except lz.LayerZeroError as error:
    print(error)
""",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_destructor_may_call_the_engine(way: str) -> None:
    try:
        done = python("-c", _CODE.format(drop=WAYS[way]), timeout=120)
    except subprocess.TimeoutExpired:
        pytest.fail("it waits for a lock that its own thread holds")
    assert done.returncode == 0 and "served" in done.stdout, done.stdout + done.stderr
