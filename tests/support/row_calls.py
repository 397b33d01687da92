"""Calls of norms, activations and rotary embeddings: put to the engine, run by an adapter, and what they must give."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import reference
import torch
from adapter_cases import DTYPES, TOLERANCES
from described import ask
from torch import Tensor


def wide(tensor: Tensor) -> Any:
    """In float64, for numpy."""
    return tensor.double().numpy()


def check(got: Tensor, want: Any, dtype: str) -> None:
    """The result is what is wanted, to the tolerance of the dtype; sums of rounded parts may be off by two of it."""
    assert got.dtype == DTYPES[dtype]
    allowed = 2 * TOLERANCES[got.dtype]
    want = torch.from_numpy(np.ascontiguousarray(want))
    torch.testing.assert_close(got.double(), want, rtol=allowed, atol=allowed)


@dataclass(frozen=True)
class Rows:
    """A call of a norm or an activation."""

    op: str
    shape: tuple[int, ...] = (6, 64)
    dtype: str = "bfloat16"
    weight_dtype: str | None = None
    given: tuple[str, ...] = ("weight", "bias")
    approximate: str = "none"

    @property
    def names(self) -> dict[str, tuple[int, ...]]:
        """Its tensors and their shapes."""
        last = self.shape[-1:]
        every = {
            "norm.rms": {"input": self.shape, "weight": last},
            "norm.layer": {"input": self.shape, "weight": last, "bias": last},
            "norm.fused_add_rms": {"input": self.shape, "residual": self.shape, "weight": last},
            "activation.silu_mul": {"gate": self.shape, "up": self.shape},
            "activation.gelu": {"input": self.shape},
        }[self.op]
        return {name: shape for name, shape in every.items() if name not in ("weight", "bias") or name in self.given}

    def ask(self, device: str, *flags: str) -> dict[str, list[str]]:
        """What the engine says about it."""
        others = {name: self.weight_dtype for name in ("weight", "bias") if self.weight_dtype and name in self.names}
        params = {"approximate": self.approximate} if self.op == "activation.gelu" else {}
        return ask(self.op, device, self.names, self.dtype, *flags, dtypes=others, **params)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors for it."""
        return {name: torch.randn(shape).to(DTYPES[self.dtype]) for name, shape in self.names.items()}

    def arguments(self, kernel: Callable[..., Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """What the engine would hand to a kernel's function."""
        known = {"eps": 1e-5, "approximate": self.approximate, **tensors}
        return {name: known.get(name) for name in inspect.signature(kernel).parameters}

    def expected(self, tensors: dict[str, Tensor]) -> list[Any]:
        """What the contract demands."""
        arrays = {name: wide(t) for name, t in tensors.items()}
        given = [arrays.get(name) for name in ("weight", "bias")]
        if self.op == "norm.rms":
            return [reference.rms_norm(arrays["input"], given[0], 1e-5).values]
        if self.op == "norm.layer":
            return [reference.layer_norm(arrays["input"], *given, 1e-5).values]
        if self.op == "norm.fused_add_rms":
            total = arrays["input"] + arrays["residual"]
            return [reference.rms_norm(total, given[0], 1e-5).values, total]
        if self.op == "activation.silu_mul":
            return [reference.silu_mul(arrays["gate"], arrays["up"]).values]
        return [reference.gelu(arrays["input"], self.approximate).values]

    def run(self, kernel: Callable[..., Any]) -> None:
        """Runs a kernel's function and looks at what it gives; arguments stay as they are."""
        tensors = self.tensors()
        before = {name: t.clone() for name, t in tensors.items()}
        got = kernel(**self.arguments(kernel, tensors))
        results = got if isinstance(got, tuple) else (got,)
        for one, want in zip(results, self.expected(tensors), strict=True):
            assert one.shape == self.shape
            check(one, want, self.dtype)
        assert all(torch.equal(t, before[name]) for name, t in tensors.items()), "an argument was written to"


@dataclass(frozen=True)
class Rope:
    """A call of a rotary embedding."""

    batch: int = 2
    seq: int = 5
    heads: int = 3
    head_dim: int = 16
    rot: int = 8
    table: int = 9
    dtype: str = "bfloat16"
    table_dtype: str | None = None
    layout: str = "BSHD"
    interleaved: bool = False
    positions: str | None = None
    positions_dtype: str = "int64"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors."""
        size = {
            "BSHD": (self.batch, self.seq, self.heads, self.head_dim),
            "BHSD": (self.batch, self.heads, self.seq, self.head_dim),
            "NHD": (self.seq, self.heads, self.head_dim),
        }[self.layout]
        found = {"input": size, "cos": (self.table, self.rot), "sin": (self.table, self.rot)}
        if self.positions is not None:
            of_each = (self.batch if self.layout != "NHD" else 1, self.seq)
            found["positions"] = of_each if self.positions == "each" else (self.seq,)
        return found

    def ask(self, device: str, *flags: str) -> dict[str, list[str]]:
        """What the engine says about it."""
        dtypes = dict.fromkeys(("cos", "sin"), self.table_dtype or self.dtype)
        if self.positions is not None:
            dtypes["positions"] = self.positions_dtype
        return ask(
            "posenc.rope", device, self.shapes, self.dtype, *flags,
            dtypes=dtypes, layout=self.layout, interleaved=self.interleaved,
        )  # fmt: skip

    def run(self, kernel: Callable[..., Any]) -> None:
        """Runs a kernel's function and looks at what it gives; arguments stay as they are."""
        shapes = self.shapes
        tensors = {name: torch.randn(shape).to(DTYPES[self.dtype]) for name, shape in shapes.items()}
        tensors |= {name: tensors[name].sin() for name in ("cos", "sin")}
        if "positions" in shapes:
            drawn = torch.randint(0, self.table, shapes["positions"])
            tensors["positions"] = drawn.to(DTYPES[self.positions_dtype])
        before = {name: t.clone() for name, t in tensors.items()}
        known = {"positions": None, "interleaved": self.interleaved, "layout": self.layout, **tensors}
        got = kernel(**{name: known[name] for name in inspect.signature(kernel).parameters})
        places = tensors["positions"].numpy() if "positions" in tensors else None
        arrays = [wide(tensors[name]) for name in ("input", "cos", "sin")]
        assert got.shape == tensors["input"].shape
        check(got, reference.rope(*arrays, self.interleaved, places, self.layout).values, self.dtype)
        assert all(torch.equal(t, before[name]) for name, t in tensors.items()), "an argument was written to"


def ropes(dtypes: tuple[str, ...], **positions: Any) -> Iterator[Rope]:
    """Every kind of call."""
    for layout, interleaved, given, rot, dtype in product(
        ("BSHD", "BHSD", "NHD"), (False, True), (None, "each", "all"), (8, 16, 4), dtypes
    ):
        yield Rope(
            layout=layout, interleaved=interleaved, positions=given, rot=rot, dtype=dtype,
            batch=1 if layout == "NHD" else 2, **positions,
        )  # fmt: skip
