"""A batch that no kernel can launch as a whole is made in pieces: the same result, and one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero import _native
from torch import Tensor

#: Blocks the described device launches along x, y and z.
LIMITS = (2**31 - 1, 7, 5)


@pytest.fixture(autouse=True)
def described() -> Iterator[None]:
    """The host as a device with the launch limits of a very small GPU."""
    _native.set_launch_limits(0, LIMITS, 1024)
    yield
    _native.set_launch_limits(0, None, None)


@contextmanager
def only(op: str, function: Callable[..., Any], axis: str, formula: str, **capabilities: Any) -> Iterator[None]:
    """A kernel that launches `formula` blocks along `axis`, and no other for the operation."""
    name = f"grid.{op}"
    grid = {"x_formula": "1", f"{axis}_formula": formula}
    options: dict[str, Any] = {"layouts": ["strided"], **capabilities}
    lz.register_kernel(
        operation=op,
        kernel_id=name,
        platform="cpu",
        supported_dtypes=["float32"],
        trusted=True,
        grid_layout=grid,
        workspace_bytes="0",
        **options,
    )(function)
    lz.force_kernel(op, name)
    try:
        yield
    finally:
        lz.unforce_kernel(op)
        lz.unregister_kernel(name)


@contextmanager
def one_warning(pieces: int) -> Iterator[list[str]]:
    """At most one warning, which names the number of pieces: one cause is warned about once a minute."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        yield said
    said += [str(warning.message) for warning in given]
    assert len(said) <= 1 and all(f"split into {pieces} pieces" in text for text in said), said


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of batch, heads, sequence, element, without a causal bound; in the dtype it is given."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("batch", [8, 15, 16])
def test_attention(layout: str, batch: int) -> None:
    seen: list[int] = []

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, causal: bool, attn_mask: Tensor | None, layout: str
    ) -> Tensor:
        assert not causal and query.shape[0] <= LIMITS[1]
        seen.append(query.shape[0])
        if layout == "BHSD":
            return attend(query, key, value, attn_mask)
        turned = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return attend(*turned, attn_mask).transpose(1, 2)

    draw = torch.Generator().manual_seed(batch)
    q, k, v = (torch.randn(batch, heads, 6, 16, generator=draw) for heads in (4, 2, 2))
    whole = torch.rand(batch, 1, 6, 6, generator=draw) < 0.7
    whole[..., 0] = True
    shared = whole[:1]
    given = [t if layout == "BHSD" else t.transpose(1, 2).contiguous() for t in (q, k, v)]
    pieces = -(-batch // LIMITS[1])
    with only("attention", kernel, "y", "batch", layouts=["BSHD", "BHSD"], supports_gqa=True, dims={"head_dim": {}}):
        for mask in (None, whole, shared):
            seen.clear()
            with one_warning(pieces):
                y = lz.attention(*given, causal=False, attn_mask=mask, layout=layout)
            expected = attend(q.double(), k.double(), v.double(), mask)
            close(y if layout == "BHSD" else y.transpose(1, 2), expected)
            assert len(seen) == pieces and sum(seen) == batch and max(seen) - min(seen) <= 1
            assert y.shape == given[0].shape and y.dtype == torch.float32


def test_paged_decode() -> None:
    def kernel(
        query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, context_lens: Tensor
    ) -> Tensor:
        assert query.shape[0] <= LIMITS[1] and block_tables.shape[0] == context_lens.shape[0] == query.shape[0]
        return paged(query, key_cache, value_cache, block_tables, context_lens)

    def paged(query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lens: Tensor) -> Tensor:
        rows = []
        for row, table, length in zip(query, tables, lens.tolist(), strict=True):
            k, v = (cache[table].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in (keys, values))
            rows.append(attend(row[None, :, None], k, v)[0, :, 0])
        return torch.stack(rows)

    draw = torch.Generator().manual_seed(1)
    query = torch.randn(20, 4, 16, generator=draw)
    caches = [torch.randn(9, 4, 2, 16, generator=draw) for _ in range(2)]
    tables = torch.randint(0, 9, (20, 3), generator=draw, dtype=torch.int32)
    lens = torch.randint(1, 13, (20,), generator=draw, dtype=torch.int32)
    cache = {"supports_kv_cache_layouts": ["NHD"], "supports_kv_cache_dtypes": ["float32"], "dims": {"head_dim": {}}}
    grid = only("attention.gqa.decode.paged", kernel, "z", "batch", layouts=["NHD"], supports_gqa=True, **cache)
    with grid, one_warning(4) as said:
        y = lz.paged_attention(query, *caches, tables, lens)
    # Nobody else splits this operation here.
    assert len(said) == 1 and "z" in said[0] and "20" in said[0]
    close(y, paged(query.double(), *(cache.double() for cache in caches), tables, lens))


def normed(input: Tensor, eps: float) -> Tensor:
    return input * torch.rsqrt(input.square().mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize("shape", [(20, 8), (3, 20, 8), (20, 3, 8), (1, 20, 8)])
def test_rows_of_any_leading_axes(shape: tuple[int, ...]) -> None:
    rows: list[int] = []

    def kernel(input: Tensor, eps: float) -> Tensor:
        rows.append(input.numel() // 8)
        assert rows[-1] <= 35
        return normed(input, eps)

    # Seven blocks of five rows.
    with only("norm.rms", kernel, "y", "ceil_div(rows, 5)"):
        x = torch.randn(*shape)
        if x.numel() // 8 <= 35:
            close(lz.rms_norm(x, eps=1e-6), normed(x.double(), 1e-6))
            assert rows == [20], "a batch that can be launched is not split"
            return
        with one_warning(2):
            y = lz.rms_norm(x, eps=1e-6)
    assert y.shape == x.shape and len(rows) == 2
    close(y, normed(x.double(), 1e-6))


def test_several_results_and_gradients() -> None:
    def kernel(input: Tensor, residual: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert input.shape[0] <= LIMITS[1]
        total = input + residual
        return normed(total, eps), total

    with only("norm.fused_add_rms", kernel, "y", "rows", autograd=True):
        x, r = (torch.randn(17, 8, requires_grad=True) for _ in range(2))
        with one_warning(3):
            y, total = lz.fused_add_rms_norm(x, r, eps=1e-6)
        weights = torch.arange(17.0)[:, None]
        (y * weights).sum().backward()
    wide = x.detach().double().requires_grad_()
    expected = normed(wide + r.detach().double(), 1e-6)
    (expected * weights.double()).sum().backward()
    close(y, expected.detach())
    close(total, (x + r).detach().double())
    assert x.grad is not None and wide.grad is not None
    close(x.grad, wide.grad)


def test_what_has_no_batch_in_it_belongs_to_every_piece() -> None:
    def kernel(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert input.shape[0] <= LIMITS[1] and weight.shape == (4, 8)
        return torch.nn.functional.linear(input, weight, bias)

    with only("mlp.linear", kernel, "y", "rows"):
        # As many rows as columns: sizes that are equal by chance are not taken for the batch.
        x, w, b = torch.randn(8, 8), torch.randn(4, 8), torch.randn(4)
        with one_warning(2):
            y = lz.linear(x, w, b)
    close(y, x.double() @ w.double().T + b.double())


def refused(op: str, call: Callable[[], Any], why: str) -> None:
    with pytest.raises(lz.errors.LayerZeroError) as raised:
        call()
    notes = " ".join(getattr(raised.value, "__notes__", []))
    assert "CUDA_GRID_DIM_EXCEEDED" in str(raised.value) or "grid" in str(raised.value)
    assert why in notes, (notes, raised.value)


def test_updates_in_place_are_not_split() -> None:
    def kernel(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        raise AssertionError("not called")

    caches = [torch.zeros(4, 4, 2, 8) for _ in range(2)]
    new = [torch.randn(12, 2, 8) for _ in range(2)]
    with only("kv_cache.append", kernel, "y", "tokens", layouts=["NHD"], supports_kv_cache_layouts=["NHD"],
              supports_kv_cache_dtypes=["float32"]):  # fmt: skip
        refused("kv_cache.append", lambda: lz.kv_append(*new, *caches, torch.arange(12)), "updates tensors in place")
    assert not caches[0].any()


def test_draws_are_not_split() -> None:
    def kernel(logits: Tensor, k: int, seed: int) -> Tensor:
        raise AssertionError("not called")

    with only("sampling.topk", kernel, "y", "rows"):
        refused("sampling.topk", lambda: lz.sample_topk(torch.randn(12, 50), k=3, seed=1), "draws random numbers")


def test_a_result_of_the_callers_own_is_not_split() -> None:
    with only("norm.rms", normed, "y", "rows"):
        out = torch.zeros(12, 8)
        refused("norm.rms", lambda: lz.rms_norm(torch.randn(12, 8), out=out), "'out'")
        assert not out.any()


def test_explain_says_that_the_batch_is_split() -> None:
    with only("norm.rms", normed, "y", "rows"):
        explained = lz.explain("rms_norm", torch.randn(12, 8))
    assert explained.chosen is None and explained.pieces == 2
    assert "the batch is split into 2 pieces" in str(explained)
    reasons = [r for c in explained.candidates if c.kernel_id == "grid.norm.rms" for r in c.reasons]
    assert [r.code for r in reasons] == ["CUDA_GRID_DIM_EXCEEDED"]
