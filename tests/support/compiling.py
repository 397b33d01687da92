"""What tests of compiled models share: a small layer, and a call that must not warn."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn


def layer(rows: int = 6) -> tuple[nn.Linear, Tensor]:
    """A linear layer, and an input for it."""
    return nn.Linear(rows, 4).eval(), torch.randn(3, rows)


def silent(call: Any) -> Any:
    """The result of a call that gives no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call()
