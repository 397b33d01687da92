"""FlashInfer's latent and sparse attention: what is declared, and what is called, on classes of the same signatures."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import described
import layerzero as lz
import pytest
import reference
import torch
from adapter_cases import TOLERANCES
from attention_calls import attend
from fake_flashinfer import FlashInfer, install
from flashinfer_installed import (
    BACKEND,
    PREFILLS,
    both_registered,
    kernel,
)
from torch import Tensor


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As if it were installed."""
    with both_registered():
        yield


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FlashInfer:
    """The library in place, and found."""
    return install(monkeypatch, FlashInfer())


# --- latent and sparse attention --------------------------------------------------------------------------------------


def held(got: Tensor, want: Any) -> None:
    """The result is what is wanted, to the tolerance of the dtype."""
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), torch.from_numpy(want.values), rtol=tolerance, atol=tolerance)


def latent(rows: int, tokens: tuple[int, ...], heads: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, and latent vectors in that shape."""
    return (
        torch.randn(rows, heads, 512).half(),
        torch.randn(rows, heads, 64).half(),
        torch.randn(*tokens, 512).half(),
        torch.randn(*tokens, 64).half(),
    )


@pytest.mark.parametrize("scale", [0.07, -0.05])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_latent_attention_over_pages(fake: FlashInfer, scale: float, index: torch.dtype) -> None:
    shapes = {"q_nope": (3, 2, 512), "q_pe": (3, 2, 64), "ckv_cache": (9, 4, 512), "kpe_cache": (9, 4, 64)}
    shapes |= {"block_tables": (3, 2), "context_lens": (3,)}
    answer = described.ask("attention.mla", "h100", shapes, "float16", scale=scale)
    assert not answer["flashinfer.mla.decode.paged"]
    q_nope, q_pe, ckv, kpe = latent(3, (9, 4))
    tables = torch.randperm(9)[:6].view(3, 2).to(index)
    for lengths in ((5, 0, 8), (0, 0, 0), (1, 2, 3)):
        context = torch.tensor(lengths, dtype=index)
        want = reference.mla_attention(
            *(t.double().numpy() for t in (q_nope, q_pe, ckv, kpe)),
            scale,
            block_tables=tables.numpy(),
            context_lens=context.numpy(),
        )
        # Queries often come heads first out of a batched product.
        turned = q_nope.transpose(0, 1).contiguous().transpose(0, 1)
        for query in (q_nope, turned):
            held(kernel("flashinfer.mla.decode.paged")(query, q_pe, ckv, kpe, tables, context, scale), want)


@pytest.mark.parametrize("causal", [True, False])
def test_latent_attention_of_several_queries_over_pages(fake: FlashInfer, causal: bool) -> None:
    run = kernel("flashinfer.mla.prefill.paged")
    q_nope, q_pe, ckv, kpe = latent(8, (9, 4))
    tables = torch.randperm(9)[:6].view(3, 2).int()
    for lengths, ends in (((5, 0, 8), (1, 3, 4, 7)), ((0, 0, 0), (0, 2, 4, 8)), ((1, 2, 3), (0, 0, 4, 6))):
        context, bounds = torch.tensor(lengths, dtype=torch.int32), torch.tensor(ends)
        want = reference.mla_attention(
            *(t.double().numpy() for t in (q_nope, q_pe, ckv, kpe)),
            0.07,
            causal=causal,
            qo_indptr=bounds.numpy(),
            block_tables=tables.numpy(),
            context_lens=context.numpy(),
        )
        held(run(q_nope, q_pe, ckv, kpe, tables, context, bounds, 0.07, causal), want)


@pytest.mark.parametrize("causal", [True, False])
def test_latent_attention_over_vectors(fake: FlashInfer, causal: bool) -> None:
    draw = random.Random(3)
    run = kernel("flashinfer.mla.prefill")
    for number in range(12):
        shape = (9,) if number % 2 else (9, 1)
        q_nope, q_pe, ckv, kpe = latent(6, shape)
        arrays = [t.double().numpy() for t in (q_nope, q_pe, ckv, kpe)]
        held(
            run(q_nope, q_pe, ckv, kpe, None, None, 0.07, causal), reference.mla_attention(*arrays, 0.07, causal=causal)
        )
        rows, keys = sorted(draw.choices(range(7), k=4)), sorted(draw.choices(range(10), k=4))
        qo, kv = torch.tensor(rows, dtype=torch.int32), torch.tensor(keys, dtype=torch.int64)
        want = reference.mla_attention(*arrays, 0.07, causal=causal, qo_indptr=qo.numpy(), kv_indptr=kv.numpy())
        held(run(q_nope, q_pe, ckv, kpe, qo, kv, 0.07, causal), want)
    with pytest.raises(lz.InvalidCallError, match=r"kv_indptr\[1\] is 99"):
        run(q_nope, q_pe, ckv, kpe, torch.tensor([0, 6]), torch.tensor([0, 99]), 0.07, causal)


def test_latent_attention_is_for_the_sizes_it_is_compiled_for() -> None:
    def reasons(device: str, width: int, dtype: str = "float16", **dtypes: str) -> list[str]:
        shapes = {"q_nope": (4, 2, width), "q_pe": (4, 2, 64), "ckv": (9, width), "kpe": (9, 64)}
        return described.ask("attention.mla.prefill", device, shapes, dtype, dtypes=dtypes, scale=0.1)[
            "flashinfer.mla.prefill"
        ]

    assert not reasons("h100", 512) and not reasons("a100", 512, "bfloat16")
    assert reasons("t4", 512)[0].startswith("[SM_TOO_OLD]")
    assert any("dim_ckv" in line for line in reasons("h100", 256))
    narrow = reasons("h100", 512, "float16", ckv="float8_e4m3fn", kpe="float8_e4m3fn")
    assert narrow[0].startswith("[KV_CACHE_DTYPE_MISMATCH]")


def test_blocks_of_one_size(fake: FlashInfer) -> None:
    draw = random.Random(5)
    run = kernel("flashinfer.sparse.block")
    taken = 0
    for _ in range(30):
        row_blocks, columns, R, C = (
            draw.choice((1, 3)),
            draw.choice((2, 4)),
            draw.choice((1, 2, 4)),
            draw.choice((1, 3)),
        )
        kv_heads, group = draw.choice((1, 2)), draw.choice((1, 2, 4))
        lists = [draw.choices(range(columns), k=draw.choice((0, 1, 3))) for _ in range(row_blocks)]
        indptr = torch.tensor([0, *map(len, lists)]).cumsum(0)
        indices = torch.tensor([j for one in lists for j in one], dtype=torch.int64)
        q = torch.randn(row_blocks * R, kv_heads * group, 64).half()
        k, v = (torch.randn(columns * C, kv_heads, 64).half() for _ in range(2))
        shapes = {"query": q.shape, "key": k.shape, "value": v.shape, "indptr": indptr.shape, "indices": indices.shape}
        reasons = described.ask("attention.sparse", "h100", shapes, "float16", block_rows=R, block_cols=C)
        assert bool(reasons["flashinfer.sparse.block"]) == (not len(indices) or R > 1 and R * group < 4)
        if reasons["flashinfer.sparse.block"]:
            continue
        taken += 1
        arrays = [t.double().numpy() if t.is_floating_point() else t.numpy() for t in (q, k, v, indptr, indices)]
        held(run(q, k, v, indptr, indices, R, C, None), reference.sparse_block(*arrays, R, C))
    assert taken >= 10
    with pytest.raises(lz.InvalidCallError, match="indices"):
        run(q, k, v, indptr, torch.full_like(indices, columns), R, C, None)


@pytest.mark.parametrize("cover", [True, False])
def test_blocks_of_many_sizes(fake: FlashInfer, cover: bool) -> None:
    draw = random.Random(6)
    run = kernel("flashinfer.sparse.variable_block")
    for _ in range(12):
        kv_heads, group = draw.choice((1, 2)), draw.choice((1, 3))
        seq_q, seq_k = 9, 12
        rows = torch.tensor([[3, 0, 2, 4 if cover else 1]] * kv_heads, dtype=torch.int64)
        columns = torch.tensor([[5, 4, 3 if cover else 2]] * kv_heads)
        mask = torch.rand(kv_heads, 4, 3) > draw.choice((0.3, 0.7, 1.1))
        q = torch.randn(kv_heads * group, seq_q, 64).half()
        k, v = (torch.randn(kv_heads, seq_k, 64).half() for _ in range(2))
        wide = torch.zeros(kv_heads, seq_q, seq_k, dtype=torch.bool)
        for head in range(kv_heads):
            one = mask[head].repeat_interleave(rows[head], 0).repeat_interleave(columns[head], 1)
            wide[head, : one.shape[0], : one.shape[1]] = one
        want = attend(q, k, v, wide.repeat_interleave(group, 0), 0.125)
        got = run(q, k, v, mask, rows, columns, None)
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)
    with pytest.raises(lz.InvalidCallError, match=r"block_row_sizes\[0, 3\] is 99, expected 0 to 4"):
        run(q, k, v, mask, rows.clone().index_fill_(1, torch.tensor([3]), 99), columns, None)


@pytest.fixture
def found() -> Iterator[str]:
    """The library itself, on this machine's GPU."""
    with described.library_itself(BACKEND, PREFILLS) as version:
        yield version


@pytest.mark.gpu
def test_latent_attention_of_the_library_itself(found: str) -> None:
    torch.manual_seed(0)
    q_nope, q_pe, ckv, kpe = (t.bfloat16() for t in latent(3, (40, 16), heads=16))
    tables = torch.randperm(40)[:36].view(3, 12).int()
    context = torch.tensor([5, 0, 190], dtype=torch.int32)
    arrays = [t.double().numpy() for t in (q_nope, q_pe, ckv, kpe)]
    want = reference.mla_attention(*arrays, 0.07, block_tables=tables.numpy(), context_lens=context.numpy())
    on_gpu = [t.cuda() for t in (q_nope, q_pe, ckv, kpe, tables, context)]
    held(kernel("flashinfer.mla.decode.paged")(*on_gpu, 0.07).cpu(), want)
    q_nope, q_pe, ckv, kpe = (t.bfloat16() for t in latent(6, (90, 1), heads=16))
    arrays = [t.double().numpy() for t in (q_nope, q_pe, ckv, kpe)]
    qo, kv = torch.tensor([0, 4, 6], dtype=torch.int32), torch.tensor([0, 60, 90], dtype=torch.int32)
    want = reference.mla_attention(*arrays, 0.07, qo_indptr=qo.numpy(), kv_indptr=kv.numpy())
    on_gpu = [t.cuda() for t in (q_nope, q_pe, ckv, kpe, qo, kv)]
    held(kernel("flashinfer.mla.prefill")(*on_gpu, 0.07, True).cpu(), want)


@pytest.mark.gpu
def test_blocks_of_the_library_itself(found: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(64, 8, 128).bfloat16()
    k, v = (torch.randn(160, 2, 128).bfloat16() for _ in range(2))
    indptr, indices = torch.tensor([0, 3, 3, 4, 6]).int(), torch.tensor([0, 4, 4, 9, 1, 2]).int()
    arrays = [t.double().numpy() if t.is_floating_point() else t.numpy() for t in (q, k, v, indptr, indices)]
    on_gpu = [t.cuda() for t in (q, k, v, indptr, indices)]
    held(kernel("flashinfer.sparse.block")(*on_gpu, 16, 16, None).cpu(), reference.sparse_block(*arrays, 16, 16))
