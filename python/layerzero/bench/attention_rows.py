"""Attention as models call it, and in torch.

What a model computes once for all its layers (masks, page tables) is made beforehand and is not timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerzero.bench.geometries import Geometry
from layerzero.bench.row import Make, Maker, Pair, Row, Sizes

if TYPE_CHECKING:
    from torch import Tensor

#: Tokens of a page of a cache.
PAGE = 16


def _heads(g: Geometry) -> str:
    return f"{g.heads}/{g.kv_heads}×{g.head_dim}"


def dense(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """Prompts and, unless keys are compressed, decode steps; tokens before heads and heads before tokens."""
    for layout in ("BSHD", "BHSD"):
        shape = f"1×{sizes.seq} {_heads(g)}"
        yield Row(g.name, "attention", "prefill", shape, _dense(g, 1, sizes.seq, sizes.seq, layout), layout)
        if g.decodes and g.latent is None:
            shape = f"{sizes.batch}×{sizes.context} {_heads(g)}"
            yield Row(g.name, "attention", "decode", shape, _dense(g, sizes.batch, 1, sizes.context, layout), layout)


def _dense(g: Geometry, batch: int, seq_q: int, seq_k: int, layout: str) -> Make:
    causal = g.decodes and seq_q > 1
    gqa, scale = g.heads != g.kv_heads, g.scale

    def bshd(made: Maker) -> Pair:
        import torch.nn.functional as F

        q = made.tensor(batch, seq_q, g.heads, g.head_dim)
        k = made.tensor(batch, seq_k, g.kv_heads, g.head_dim)
        v = made.tensor(batch, seq_k, g.kv_heads, g.v_dim or g.head_dim)
        return Pair(
            lambda lz: lz.attention(q, k, v, causal, scale),
            lambda: F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, scale=scale, enable_gqa=gqa
            ).transpose(1, 2),
        )

    def bhsd(made: Maker) -> Pair:
        import torch.nn.functional as F

        q, k, v = _turned(g, made, batch, seq_q, seq_k)
        return Pair(
            lambda lz: lz.attention(q, k, v, causal, scale, layout="BHSD"),
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa),
        )

    return bshd if layout == "BSHD" else bhsd


def _turned(g: Geometry, made: Maker, batch: int, seq_q: int, seq_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, heads before tokens."""
    return (
        made.tensor(batch, g.heads, seq_q, g.head_dim),
        made.tensor(batch, g.kv_heads, seq_k, g.head_dim),
        made.tensor(batch, g.kv_heads, seq_k, g.v_dim or g.head_dim),
    )


def window(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """Sliding windows: prompts longer than the window by half of it or more, unless too long; and decode steps."""
    if g.window is None:
        return
    seq = max(g.window * 3 // 2, sizes.seq)
    if seq <= sizes.longest:
        make = _window_prefill(g, seq, g.window)
        yield Row(g.name, "window", "prefill", f"1×{seq} {_heads(g)} w{g.window}", make, "BHSD")
    context = g.window + sizes.context
    make = _window_decode(g, sizes.batch, context, g.window)
    yield Row(g.name, "window", "decode", f"{sizes.batch}×{context} {_heads(g)} w{g.window}", make, "BHSD")


def _window_prefill(g: Geometry, seq: int, width: int) -> Make:
    def make(made: Maker) -> Pair:
        import torch
        import torch.nn.functional as F

        q, k, v = _turned(g, made, 1, seq, seq)
        seen = torch.ones(seq, seq, dtype=torch.bool, device=made.device).tril().triu(1 - width)
        gqa = g.heads != g.kv_heads
        # A window of w keys is the key at the query's own position and w - 1 before it.
        return Pair(
            lambda lz: lz.attention(q, k, v, window=width - 1, layout="BHSD"),
            lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=gqa),
        )

    return make


def _window_decode(g: Geometry, batch: int, context: int, width: int) -> Make:
    def make(made: Maker) -> Pair:
        import torch.nn.functional as F

        q, k, v = _turned(g, made, batch, 1, context)
        gqa = g.heads != g.kv_heads
        return Pair(
            lambda lz: lz.attention(q, k, v, window=width - 1, layout="BHSD"),
            lambda: F.scaled_dot_product_attention(q, k[:, :, -width:], v[:, :, -width:], enable_gqa=gqa),
        )

    return make


def softcap(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """Scores that are bounded, which torch's own function does not take."""
    if not g.softcap:
        return
    for phase, batch, seq_q, seq_k in (
        ("prefill", 1, sizes.seq, sizes.seq),
        ("decode", sizes.batch, 1, sizes.context),
    ):
        make = _softcap(g, batch, seq_q, seq_k)
        yield Row(g.name, "softcap", phase, f"{batch}×{seq_k} {_heads(g)} cap{g.softcap:g}", make, "BHSD")


def _softcap(g: Geometry, batch: int, seq_q: int, seq_k: int) -> Make:
    cap, scale, group = g.softcap, g.head_dim**-0.5, g.heads // g.kv_heads

    def make(made: Maker) -> Pair:
        import torch

        q, k, v = _turned(g, made, batch, seq_q, seq_k)
        hidden = torch.ones(seq_q, seq_k, dtype=torch.bool, device=made.device).triu(1 + seq_k - seq_q)

        def capped() -> Tensor:
            keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.tanh(q @ keys.transpose(-1, -2) * scale / cap) * cap
            if seq_q > 1:
                scores = scores.masked_fill(hidden, -torch.inf)
            return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ values

        return Pair(lambda lz: lz.attention(q, k, v, softcap=cap, layout="BHSD"), capped)

    return make


def paged(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """Decode steps over a cache of pages."""
    if g.decodes and g.latent is None:
        shape = f"{sizes.batch}×{sizes.context} {_heads(g)} p{PAGE}"
        yield Row(g.name, "paged", "decode", shape, _paged(g, sizes.batch, sizes.context), "NHD")


def _tables(made: Maker, batch: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which pages each sequence has, its length, and which of its slots are used: from half of the context to all of it."""
    import torch

    pages = context // PAGE
    tables = made.order(batch * pages, torch.int32).view(batch, pages)
    lengths = made.below(context // 2, context + 1, batch, dtype=torch.int32)
    used = torch.arange(context, device=made.device) < lengths[:, None]
    return tables, lengths, used[:, None, None]


def _paged(g: Geometry, batch: int, context: int) -> Make:
    def make(made: Maker) -> Pair:
        import torch.nn.functional as F

        tables, lengths, used = _tables(made, batch, context)
        q = made.tensor(batch, g.heads, g.head_dim)
        keys, values = (made.tensor(tables.numel(), PAGE, g.kv_heads, g.head_dim) for _ in range(2))
        gqa, scale = g.heads != g.kv_heads, g.scale

        def gathered() -> Tensor:
            k, v = (cache[tables].flatten(1, 2).transpose(1, 2) for cache in (keys, values))
            return F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=used, scale=scale, enable_gqa=gqa)[
                :, :, 0
            ]

        return Pair(lambda lz: lz.paged_attention(q, keys, values, tables, lengths, scale), gathered)

    return make


def latent(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """Decode steps over pages of compressed keys and values."""
    if g.latent is not None:
        shape = f"{sizes.batch}×{sizes.context} {g.heads}×({g.latent}+{g.rotary}) p{PAGE}"
        yield Row(g.name, "mla", "decode", shape, _latent(g, g.latent, sizes.batch, sizes.context))


def _latent(g: Geometry, width: int, batch: int, context: int) -> Make:
    # The scale is that of the heads before the projections were absorbed.
    scale = g.head_dim**-0.5

    def make(made: Maker) -> Pair:
        import torch
        import torch.nn.functional as F

        tables, lengths, used = _tables(made, batch, context)
        content, position = made.tensor(batch, g.heads, width), made.tensor(batch, g.heads, g.rotary)
        ckv, kpe = made.tensor(tables.numel(), PAGE, width), made.tensor(tables.numel(), PAGE, g.rotary)

        def gathered() -> Tensor:
            c, r = (cache[tables].flatten(1, 2)[:, None] for cache in (ckv, kpe))
            q = torch.cat([content, position], -1)[:, :, None]
            k = torch.cat([c, r], -1)
            return F.scaled_dot_product_attention(q, k, c, attn_mask=used, scale=scale, enable_gqa=True)[:, :, 0]

        return Pair(
            lambda lz: lz.mla_attention(content, position, ckv, kpe, scale, block_tables=tables, context_lens=lengths),
            gathered,
        )

    return make


def mask(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """Prompts of several lengths that are padded, or a bias for every head."""
    if g.mask is not None:
        shape = f"{sizes.batch}×{sizes.seq} {_heads(g)} {g.mask}"
        yield Row(g.name, "mask", "prefill", shape, _mask(g, sizes.batch, sizes.seq), "BHSD")


def _mask(g: Geometry, batch: int, seq: int) -> Make:
    def make(made: Maker) -> Pair:
        import torch
        import torch.nn.functional as F

        q, k, v = _turned(g, made, batch, seq, seq)
        gqa, scale = g.heads != g.kv_heads, g.scale
        if g.mask == "bias":
            given = made.tensor(1, g.heads, seq, seq)
        else:
            # The pads come after the tokens: no query is without a key.
            given = (torch.arange(seq, device=made.device) < made.below(seq // 2, seq + 1, batch, 1))[:, None, None]
            if g.decodes:
                given = given & torch.ones(seq, seq, dtype=torch.bool, device=made.device).tril()
        return Pair(
            lambda lz: lz.attention(q, k, v, False, scale, attn_mask=given, layout="BHSD"),
            lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=given, scale=scale, enable_gqa=gqa),
        )

    return make


def cross(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """Decode steps that attend to an encoder's keys."""
    if g.source is not None:
        shape = f"{sizes.batch}×{g.source} {_heads(g)}"
        yield Row(g.name, "cross_attention", "decode", shape, _cross(g, sizes.batch, g.source), "BHSD")


def _cross(g: Geometry, batch: int, keys: int) -> Make:
    def make(made: Maker) -> Pair:
        import torch.nn.functional as F

        q, k, v = _turned(g, made, batch, 1, keys)
        scale = g.scale
        return Pair(
            lambda lz: lz.cross_attention(q, k, v, scale, layout="BHSD"),
            lambda: F.scaled_dot_product_attention(q, k, v, scale=scale),
        )

    return make
