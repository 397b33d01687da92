"""Norms, activations, positions, products, sampling, quantization and caches as models call them, and in torch.

What a model computes once for all its layers (cosines and sines, slots) is made beforehand and is not timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from layerzero.bench.attention_rows import PAGE
from layerzero.bench.geometries import Geometry
from layerzero.bench.row import Make, Maker, Pair, Row, Sizes

if TYPE_CHECKING:
    from torch import Tensor

TOP_K, TOP_P = 50, 0.9


def _phases(g: Geometry, sizes: Sizes, width: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """What activations of a width are in each phase: its name, their shape, and that in words."""
    yield "prefill", (1, sizes.seq, width), f"{sizes.seq}×{width}"
    if g.decodes:
        yield "decode", (sizes.batch, 1, width), f"{sizes.batch}×{width}"


def rms_norm(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """Before each part of a layer; of some models also over every head."""
    if g.norm != "rms":
        return
    for phase, shape, words in _phases(g, sizes, g.hidden):
        yield Row(g.name, "rms_norm", phase, words, _rms_norm(shape, g.eps))
    if g.head_norm:
        words = f"{sizes.seq}×{g.heads}×{g.head_dim}"
        yield Row(g.name, "rms_norm", "prefill", words, _rms_norm((1, sizes.seq, g.heads, g.head_dim), g.eps))


def _rms_norm(shape: tuple[int, ...], eps: float) -> Make:
    width = shape[-1]

    def make(made: Maker) -> Pair:
        import torch.nn.functional as F

        x, w = made.tensor(*shape), made.tensor(width)
        return Pair(lambda lz: lz.rms_norm(x, w, eps), lambda: F.rms_norm(x, (width,), w, eps))

    return make


def layer_norm(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """With torch's signature."""
    if g.norm == "layer":
        for phase, shape, words in _phases(g, sizes, g.hidden):
            yield Row(g.name, "layer_norm", phase, words, _layer_norm(shape, g.eps))


def _layer_norm(shape: tuple[int, ...], eps: float) -> Make:
    width = shape[-1]

    def make(made: Maker) -> Pair:
        import torch.nn.functional as F

        x, w, b = made.tensor(*shape), made.tensor(width), made.tensor(width)
        return Pair(
            lambda lz: lz.layer_norm(x, (width,), w, b, eps),
            lambda: F.layer_norm(x, (width,), w, b, eps),
        )

    return make


def fused_add_rms_norm(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """The end of one part of a layer and the beginning of the next."""
    if g.norm == "rms":
        for phase, shape, words in _phases(g, sizes, g.hidden):
            yield Row(g.name, "fused_add_rms_norm", phase, words, _fused_add_rms_norm(shape, g.eps))


def _fused_add_rms_norm(shape: tuple[int, ...], eps: float) -> Make:
    width = shape[-1]

    def make(made: Maker) -> Pair:
        import torch.nn.functional as F

        x, residual, w = made.tensor(*shape), made.tensor(*shape), made.tensor(width)

        def added() -> tuple[Tensor, Tensor]:
            total = x + residual
            return F.rms_norm(total, (width,), w, eps), total

        return Pair(lambda lz: lz.fused_add_rms_norm(x, residual, w, eps), added)

    return make


def silu_mul(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """The gate of a feed-forward block."""
    if g.activation == "silu":
        for phase, shape, words in _phases(g, sizes, g.inner):
            yield Row(g.name, "silu_mul", phase, words, _silu_mul(shape))


def _silu_mul(shape: tuple[int, ...]) -> Make:
    def make(made: Maker) -> Pair:
        import torch.nn.functional as F

        gate, up = made.tensor(*shape), made.tensor(*shape)
        return Pair(lambda lz: lz.silu_mul(gate, up), lambda: F.silu(gate) * up)

    return make


def gelu(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """The activation of a feed-forward block."""
    if g.activation in ("gelu", "tanh"):
        approximate = "tanh" if g.activation == "tanh" else "none"
        for phase, shape, words in _phases(g, sizes, g.inner):
            yield Row(g.name, "gelu", phase, f"{words} {approximate}", _gelu(shape, approximate))


def _gelu(shape: tuple[int, ...], approximate: str) -> Make:
    def make(made: Maker) -> Pair:
        import torch.nn.functional as F

        x = made.tensor(*shape)
        return Pair(lambda lz: lz.gelu(x, approximate), lambda: F.gelu(x, approximate=approximate))

    return make


def rope(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """Of the queries. Of compressed keys, the dimensions beside them are rotated, and no others."""
    if not g.rotary:
        return
    size = g.rotary if g.latent is not None else g.head_dim
    kind = f"{g.heads}×{size} r{g.rotary}{' pairs' if g.interleaved else ''}"
    yield Row(g.name, "rope", "prefill", f"1×{sizes.seq} {kind}", _rope(g, size, 1, sizes.seq, sizes.seq), "BSHD")
    make = _rope(g, size, sizes.batch, 1, sizes.context)
    yield Row(g.name, "rope", "decode", f"{sizes.batch}×1 {kind}", make, "BSHD")


def _rope(g: Geometry, size: int, batch: int, seq: int, table: int) -> Make:
    rotary, interleaved = g.rotary, g.interleaved

    def turned(x: Tensor) -> Tensor:
        import torch

        if interleaved:
            return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        half = rotary // 2
        return torch.cat([-x[..., half:], x[..., :half]], -1)

    def make(made: Maker) -> Pair:
        import torch

        x = made.tensor(batch, seq, g.heads, size)
        places = torch.arange(table, device=made.device)[:, None]
        angles = places * 1e4 ** -torch.linspace(0.0, 1.0, rotary // 2, device=made.device)
        cos, sin = angles.cos().to(made.dtype), angles.sin().to(made.dtype)
        positions = made.below(0, table, batch, 1) if seq == 1 else places.T

        def wide(one: Tensor) -> Tensor:
            """A column per dimension, as models keep it, at the positions of the tokens, for every head."""
            doubled = one.repeat_interleave(2, -1) if interleaved else torch.cat([one, one], -1)
            return doubled[positions][:, :, None]

        a, b = wide(cos), wide(sin)

        def rotated() -> Tensor:
            if rotary == size:
                return x * a + turned(x) * b
            first, rest = x[..., :rotary], x[..., rotary:]
            return torch.cat([first * a + turned(first) * b, rest], -1)

        if seq == 1:
            return Pair(lambda lz: lz.rope(x, cos, sin, interleaved, positions=positions), rotated)
        return Pair(lambda lz: lz.rope(x, cos, sin, interleaved), rotated)

    return make


def linear(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """Queries, keys and values of a prompt; the first product of the feed-forward block of a decode step."""
    rows, columns = g.projection
    make = _linear((1, sizes.seq, columns), rows, g.bias)
    yield Row(g.name, "linear", "prefill", f"{sizes.seq}×{columns}→{rows}", make, elements=rows * columns)
    if g.decodes:
        make = _linear((sizes.batch, 1, g.hidden), g.inner, g.bias)
        words = f"{sizes.batch}×{g.hidden}→{g.inner}"
        yield Row(g.name, "linear", "decode", words, make, elements=g.inner * g.hidden)


def _linear(shape: tuple[int, ...], rows: int, bias: bool) -> Make:
    columns = shape[-1]

    def make(made: Maker) -> Pair:
        import torch.nn.functional as F

        x, w = made.tensor(*shape), made.tensor(rows, columns, scale=columns**-0.5)
        if not bias:
            return Pair(lambda lz: lz.linear(x, w), lambda: F.linear(x, w))
        b = made.tensor(rows)
        return Pair(lambda lz: lz.linear(x, w, b), lambda: F.linear(x, w, b))

    return make


def embedding(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """The tokens of a prompt."""
    words = f"{sizes.seq} of {g.vocab}×{g.hidden}"
    make = _embedding(sizes.seq, g.vocab, g.hidden)
    yield Row(g.name, "embedding", "prefill", words, make, elements=g.vocab * g.hidden)


def _embedding(seq: int, vocab: int, hidden: int) -> Make:
    def make(made: Maker) -> Pair:
        import torch.nn.functional as F

        ids, table = made.below(0, vocab, 1, seq), made.tensor(vocab, hidden)
        return Pair(lambda lz: lz.embedding(ids, table), lambda: F.embedding(ids, table))

    return make


def _logits(made: Maker, batch: int, vocab: int) -> Tensor:
    """Logits as a model gives them: some tokens are much more likely than the rest."""
    import torch

    return made.tensor(batch, vocab, dtype=torch.float32, scale=3.0)


def sample_topk(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """One of the most likely tokens."""
    if g.decodes:
        make = _sample_topk(sizes.batch, g.vocab)
        yield Row(g.name, "sample_topk", "decode", f"{sizes.batch}×{g.vocab} k{TOP_K}", make)


def _sample_topk(batch: int, vocab: int) -> Make:
    def make(made: Maker) -> Pair:
        import torch

        logits = _logits(made, batch, vocab)

        def drawn() -> Tensor:
            values, ids = logits.topk(TOP_K)
            return ids.gather(-1, torch.multinomial(values.softmax(-1), 1))[:, 0]

        return Pair(lambda lz: lz.sample_topk(logits, TOP_K), drawn)

    return make


def sample_topp(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """One of the tokens that have the probability together."""
    if g.decodes:
        make = _sample_topp(sizes.batch, g.vocab)
        yield Row(g.name, "sample_topp", "decode", f"{sizes.batch}×{g.vocab} p{TOP_P}", make)


def _sample_topp(batch: int, vocab: int) -> Make:
    def make(made: Maker) -> Pair:
        import torch

        logits = _logits(made, batch, vocab)

        def drawn() -> Tensor:
            ordered, ids = logits.softmax(-1).sort(-1, descending=True)
            ordered[ordered.cumsum(-1) - ordered > TOP_P] = 0.0
            return ids.gather(-1, torch.multinomial(ordered, 1))[:, 0]

        return Pair(lambda lz: lz.sample_topp(logits, TOP_P), drawn)

    return make


def quantize(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """Activations of a prompt, one scale for each token."""
    for format in ("int8", "fp8_e4m3"):
        words = f"{sizes.seq}×{g.hidden} {format}"
        yield Row(g.name, "quantize", "prefill", words, _quantize(sizes.seq, g.hidden, format))


def _quantize(rows: int, width: int, format: str) -> Make:
    def make(made: Maker) -> Pair:
        import torch

        x = made.tensor(rows, width)

        def integers() -> tuple[Tensor, Tensor]:
            scale = x.abs().amax(-1, keepdim=True) / 127
            return (x / scale).round().clamp(-127, 127).to(torch.int8), scale

        def floats() -> tuple[Tensor, Tensor]:
            scale = x.abs().amax(-1, keepdim=True) / 448
            return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

        plain = integers if format == "int8" else floats
        return Pair(lambda lz: lz.quantize(x, format, granularity="per_channel"), plain)

    return make


def dequantize(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """The weight of a projection, one scale for each row."""
    rows, columns = g.projection
    make = _dequantize(rows, columns)
    yield Row(g.name, "dequantize", "prefill", f"{rows}×{columns} int8", make, elements=rows * columns)


def _dequantize(rows: int, columns: int) -> Make:
    def make(made: Maker) -> Pair:
        import torch

        values = made.below(-127, 128, rows, columns, dtype=torch.int8)
        scales = made.tensor(rows, 1, dtype=torch.float32, scale=0.01).abs()
        kind, name = made.dtype, str(made.dtype).removeprefix("torch.")
        narrow = scales.to(kind)
        return Pair(
            lambda lz: lz.dequantize(values, scales, dtype=name, granularity="per_channel"),
            lambda: values.to(kind) * narrow,
        )

    return make


def kv_append(g: Geometry, sizes: Sizes) -> Iterator[Row]:
    """New keys and values into a cache of pages."""
    if not g.decodes or g.latent is not None:
        return
    for phase, tokens in (("prefill", sizes.seq), ("decode", sizes.batch)):
        words = f"{tokens}×{g.kv_heads}×{g.head_dim} p{PAGE}"
        yield Row(g.name, "kv_append", phase, words, _kv_append(g, tokens, sizes.batch * sizes.context), "NHD")


def _kv_append(g: Geometry, tokens: int, slots: int) -> Make:
    def make(made: Maker) -> Pair:
        import torch

        k, v = (made.tensor(tokens, g.kv_heads, g.head_dim) for _ in range(2))
        sizes: tuple[Any, ...] = (math.ceil(slots / PAGE), PAGE, g.kv_heads, g.head_dim)
        keys, values = (torch.zeros(sizes, dtype=made.dtype, device=made.device) for _ in range(2))
        flat = keys.view(-1, *sizes[2:]), values.view(-1, *sizes[2:])
        places = made.order(slots)[:tokens]

        def appended() -> None:
            flat[0][places] = k
            flat[1][places] = v

        return Pair(lambda lz: lz.kv_append(k, v, keys, values, places), appended, (keys, values))

    return make
