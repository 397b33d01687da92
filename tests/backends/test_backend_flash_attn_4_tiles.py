"""FlashAttention 4 with tiles of our choice: which calls get which, and that results are right."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any

import described
import pytest
import torch
from attention_calls import Dense, dense_calls, least
from described import adapter, takes
from torch import Tensor, nn

VERSION = "4.0.0b36"
PREFIXES = ("flash_attn.v4.few_rows", "flash_attn.v4.all_keys")
#: Queries and keys of a tile that a Hopper kernel of the library is compiled for.
ROWS = (64, 128, 192)


class Library:
    """`flash_attn.cute` with a forward pass that takes tiles, and notes them."""

    def __init__(self) -> None:
        self.tiles: list[tuple[int, int]] = []

    def _flash_attn_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        tile_mn: tuple[int, int] | None = None,
    ) -> tuple[Tensor, None]:
        assert tile_mn is not None and tile_mn[0] in ROWS and tile_mn[1] % 16 == 0 and 0 < tile_mn[1] <= 208
        assert softmax_scale is None or softmax_scale > 0.0
        assert not any(t.requires_grad for t in (q, k, v))
        self.tiles.append(tile_mn)
        dtype = q.dtype
        seq_q, seq_k = q.shape[1], k.shape[1]
        mask = torch.ones(seq_q, seq_k, dtype=torch.bool).tril(seq_k - seq_q) if causal else None
        q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        done = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale)
        return done.nan_to_num(0.0).transpose(1, 2).to(dtype), None

    def install(self, monkeypatch: pytest.MonkeyPatch, forward: Any) -> None:
        """Puts it in the place of the real one."""
        cute, interface = types.ModuleType("flash_attn.cute"), types.ModuleType("flash_attn.cute.interface")
        cute.__dict__.update(flash_attn_func=forward, flash_attn_varlen_func=forward)
        interface._flash_attn_fwd = forward  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
        monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
        monkeypatch.setattr(metadata, "version", lambda _: VERSION)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with described.registered("flash_attn_4", VERSION), described.registered("flash_attn_4_tiles", VERSION):
        yield


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    made.install(monkeypatch, made._flash_attn_fwd)
    assert adapter("flash_attn_4_tiles").detect() == VERSION
    return made


def names(call: Dense, device: str = "h100") -> set[str]:
    """The kernels with tiles of ours that take a call."""
    return {name for prefix in PREFIXES for name in takes(call.ask(device), prefix)}


def test_which_calls_get_which_tiles() -> None:
    plain = Dense(seq_q=197, seq_k=197, head_dim=64, v_dim=64)
    assert names(plain) == set(PREFIXES)
    assert names(replace(plain, seq_k=209, seq_q=209)) == {PREFIXES[0]}
    assert names(replace(plain, head_dim=128, v_dim=128)) == set()
    assert names(replace(plain, head_dim=256, v_dim=256)) == {PREFIXES[0]}
    assert names(replace(plain, softcap=30.0)) == names(replace(plain, window_left=16)) == set()
    for device in ("a100", "b200"):
        assert names(plain, device) == set(), "the tiles are those of Hopper kernels"


@pytest.mark.slow
def test_calls_are_right_and_tiles_fit(library: Library) -> None:
    torch.manual_seed(0)
    kernels: dict[str, Callable[..., Any]] = adapter("flash_attn_4_tiles").KERNELS
    ran: dict[str, int] = {}
    for call in dense_calls(5, 160, head_dim=(64, 64, 32, 256)):
        call = replace(call, v_dim=call.head_dim)
        for name in names(call):
            tensors, function = call.tensors(), kernels[name]
            arguments = call.arguments(function, tensors)
            call.check(function(**arguments), call.contract(tensors))
            rows, keys = library.tiles[-1]
            if "all_keys" in name:
                assert keys - 16 < call.seq_k <= keys, "all keys in one tile, and no more room than needed"
            else:
                assert rows == 64
            plan = function.direct(*arguments.values())  # type: ignore[attr-defined]
            if plan is not None:
                call.check(plan[0](*plan[1]), call.contract(tensors))
                assert library.tiles[-1] == (rows, keys)
            ran[name] = ran.get(name, 0) + 1
    assert set(ran) == set(kernels) and min(ran.values()) >= least(5), ran


def test_a_library_that_takes_no_tiles_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False) -> None:
        raise AssertionError("not to be called")

    Library().install(monkeypatch, without)
    with pytest.raises(ImportError, match="does not take tile_mn"):
        adapter("flash_attn_4_tiles").detect()
