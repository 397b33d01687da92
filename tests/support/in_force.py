"""What is in force: who serves a norm, and what settings say."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import torch

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
PLAIN, COMPOSED, REFERENCE = "torch.rms_norm", "torch.rms_norm.composed", "lz_cpu.ref.norm.rms"


def chosen() -> str:
    """Who serves rms_norm, by what is asked and by what is answered."""
    told = str(lz.which("rms_norm", X).kernel_id)
    right = X * torch.rsqrt(X.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(lz.rms_norm(X), right, rtol=1e-5, atol=1e-5)
    return told


def said(key: str) -> lz.Setting:
    """A setting in force."""
    (found,) = (setting for setting in lz.settings() if setting.key == key)
    return found


#: What conftest.py says, and test_isa.py.
SAID_BY_THE_ENVIRONMENT = ("verify", "max_cpu_isa", "perfdb.priors")


def changed() -> dict[str, Any]:
    """Everything that is not as it is by default, but for what the tests' own environment says (conftest.py)."""
    settings = (setting for setting in lz.settings() if setting.origin["layer"] != "default")
    return {setting.key: setting.value for setting in settings if setting.key not in SAID_BY_THE_ENVIRONMENT}
