"""The literal torch code a user would write for each public function, next to the call through LayerZero.

Every figure "against torch" is against these: torch's own function called directly, with torch's own choice inside.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import layerzero as lz

if TYPE_CHECKING:
    from torch import Tensor

Call = Callable[[], Any]


class Case(NamedTuple):
    """A call, written for LayerZero and in plain torch."""

    name: str
    lz: Call
    torch: Call
    #: Whether both give the same tensors; random draws and quantized values do not have to.
    same: bool = True


def cases(
    device: str = "cpu", rows: int = 4, width: int = 256, vocabulary: int = 1000, context: int = 33
) -> list[Case]:
    """Every public function in every form, at sizes at which a kernel costs next to nothing."""
    import torch

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        made = _Made(rows, width, vocabulary, context, dtype)
        return [*_norms(made), *_products(made), *_attention(made), *_positions(made), *_sampling(made), *_caches(made)]


class _Made(NamedTuple):
    rows: int
    width: int
    vocabulary: int
    context: int
    dtype: Any

    def tensor(self, *shape: int) -> Tensor:
        import torch

        return torch.randn(*shape).to(self.dtype)


def _norms(made: _Made) -> Iterator[Case]:
    import torch
    import torch.nn.functional as F

    width = made.width
    x, residual, w, b = (
        made.tensor(made.rows, width),
        made.tensor(made.rows, width),
        made.tensor(width),
        made.tensor(width),
    )
    out = torch.empty_like(x)
    yield Case("rms_norm", lambda: lz.rms_norm(x, w, 1e-6), lambda: F.rms_norm(x, (width,), w, 1e-6))
    yield Case("rms_norm, eps=", lambda: lz.rms_norm(x, w, eps=1e-6), lambda: F.rms_norm(x, (width,), w, eps=1e-6))
    yield Case("layer_norm", lambda: lz.layer_norm(x, weight=w, bias=b), lambda: F.layer_norm(x, (width,), w, b))
    yield Case(
        "layer_norm, torch's signature",
        lambda: lz.layer_norm(x, (width,), w, b, 1e-5),
        lambda: F.layer_norm(x, (width,), w, b, 1e-5),
    )

    def added() -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, (width,), w, 1e-6), total

    yield Case("fused_add_rms_norm", lambda: lz.fused_add_rms_norm(x, residual, w, 1e-6), added)
    yield Case(
        "rms_norm, out=",
        lambda: lz.rms_norm(x, w, 1e-6, out=out),
        lambda: out.copy_(F.rms_norm(x, (width,), w, 1e-6)),
    )


def _products(made: _Made) -> Iterator[Case]:
    import torch.nn.functional as F

    width = made.width
    x, w, b = made.tensor(made.rows, width), made.tensor(width, width), made.tensor(width)
    gate, up, down = made.tensor(2 * width, width), made.tensor(2 * width, width), made.tensor(width, 2 * width)
    ids = (made.tensor(made.rows).float().abs() * 10).long() % width
    yield Case("linear", lambda: lz.linear(x, w), lambda: F.linear(x, w))
    yield Case("linear, bias", lambda: lz.linear(x, w, b), lambda: F.linear(x, w, b))
    yield Case(
        "fused_mlp",
        lambda: lz.fused_mlp(x, up, down, gate, "silu"),
        lambda: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
    )
    yield Case("silu_mul", lambda: lz.silu_mul(x, x), lambda: F.silu(x) * x)
    yield Case("gelu", lambda: lz.gelu(x), lambda: F.gelu(x))
    yield Case("gelu, tanh", lambda: lz.gelu(x, "tanh"), lambda: F.gelu(x, approximate="tanh"))
    yield Case("softmax", lambda: lz.softmax(x), lambda: F.softmax(x, -1))
    yield Case("embedding", lambda: lz.embedding(ids, w), lambda: F.embedding(ids, w))


def _attention(made: _Made) -> Iterator[Case]:
    import torch
    import torch.nn.functional as F

    sdpa = F.scaled_dot_product_attention
    for keys in (made.context, 8):
        yield from _of_both_layouts(made, keys)
    keys = made.context
    q, k, v = made.tensor(1, 4, keys, 64), made.tensor(1, 2, keys, 64), made.tensor(1, 2, keys, 64)
    one = made.tensor(1, 4, 1, 64)
    mask = torch.ones(keys, keys, dtype=torch.bool).tril()
    window = mask & torch.ones_like(mask).triu(-4)
    yield Case(
        "attention, grouped",
        lambda: lz.attention(q, k, v, layout="BHSD"),
        lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True),
    )
    yield Case(
        "attention, decode",
        lambda: lz.attention(one, k, v, layout="BHSD"),
        lambda: sdpa(one, k, v, enable_gqa=True),
    )
    yield Case(
        "attention, mask",
        lambda: lz.attention(q, k, v, attn_mask=mask, causal=False, layout="BHSD"),
        lambda: sdpa(q, k, v, attn_mask=mask, enable_gqa=True),
    )
    yield Case(
        "attention, window",
        lambda: lz.attention(q, k, v, window=4, layout="BHSD"),
        lambda: sdpa(q, k, v, attn_mask=window, enable_gqa=True),
    )
    yield Case(
        "scaled_dot_product_attention",
        lambda: lz.scaled_dot_product_attention(q, q, q, is_causal=True),
        lambda: sdpa(q, q, q, is_causal=True),
    )
    yield Case("cross_attention", lambda: lz.cross_attention(one, q, q, layout="BHSD"), lambda: sdpa(one, q, q))
    yield from _paged(made)


def _of_both_layouts(made: _Made, keys: int) -> Iterator[Case]:
    import torch.nn.functional as F

    sdpa = F.scaled_dot_product_attention
    q, k, v = (made.tensor(1, keys, 4, 64) for _ in range(3))
    a, b, c = (t.transpose(1, 2).contiguous() for t in (q, k, v))

    def turned() -> Tensor:
        return sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True).transpose(1, 2)

    yield Case(f"attention, BSHD, {keys} keys", lambda: lz.attention(q, k, v), turned)
    yield Case(
        f"attention, BHSD, {keys} keys",
        lambda: lz.attention(a, b, c, layout="BHSD"),
        lambda: sdpa(a, b, c, is_causal=True),
    )


def _paged(made: _Made) -> Iterator[Case]:
    import torch
    import torch.nn.functional as F

    batch, pages, size = 2, 3, 16
    query, cache = made.tensor(batch, 4, 64), made.tensor(2, batch * pages, size, 2, 64)
    tables = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    lengths = torch.tensor([40, 17], dtype=torch.int32)

    def gathered() -> Tensor:
        keys, values = (one[tables].flatten(1, 2).transpose(1, 2) for one in cache)
        seen = torch.arange(keys.shape[2], device=keys.device) < lengths[:, None]
        mask = seen[:, None, None]
        return F.scaled_dot_product_attention(query[:, :, None], keys, values, attn_mask=mask, enable_gqa=True)[:, :, 0]

    yield Case("paged_attention", lambda: lz.paged_attention(query, cache[0], cache[1], tables, lengths), gathered)
    yield from _packed(made)


def _packed(made: _Made) -> Iterator[Case]:
    import torch
    import torch.nn.functional as F

    ends = [0, made.context // 3, made.context]
    bounds = torch.tensor(ends, dtype=torch.int32)
    q, k, v = (made.tensor(made.context, heads, 64) for heads in (4, 2, 2))

    def by_sequence() -> Tensor:
        parts = []
        for start, end in itertools.pairwise(bounds.tolist()):
            a, b, c = (t[start:end].transpose(0, 1)[None] for t in (q, k, v))
            parts.append(F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(parts)

    yield Case("varlen_attention", lambda: lz.varlen_attention(q, k, v, bounds, bounds), by_sequence)
    rows = (
        made.tensor(1, 4, made.context, 64),
        made.tensor(1, 4, made.context, 64),
        made.tensor(1, 4, made.context, 64),
    )

    def with_lse() -> tuple[Tensor, Tensor]:
        scores = (rows[0] @ rows[1].transpose(-1, -2) * 64**-0.5).float()
        return scores.softmax(-1).to(made.dtype) @ rows[2], scores.logsumexp(-1)

    yield Case("attention_lse", lambda: lz.attention_lse(*rows, False, layout="BHSD"), with_lse)
    a, b = made.tensor(made.rows, 4, 64), made.tensor(made.rows, 4, 64)
    lse_a, lse_b = made.tensor(made.rows, 4).float(), made.tensor(made.rows, 4).float()

    def merged() -> tuple[Tensor, Tensor]:
        lse = torch.logaddexp(lse_a, lse_b)
        of_a, of_b = (lse_a - lse).exp()[..., None], (lse_b - lse).exp()[..., None]
        return (of_a * a + of_b * b).to(made.dtype), lse

    yield Case("merge_states", lambda: lz.merge_states(a, lse_a, b, lse_b), merged)


def _positions(made: _Made) -> Iterator[Case]:
    import torch

    x = made.tensor(1, made.context, 4, 64)
    turned = x.transpose(1, 2).contiguous()
    cos, sin = made.tensor(made.context, 32), made.tensor(made.context, 32)
    wide = [torch.cat([t, t], -1) for t in (cos, sin)]

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    a, b = (t[:, None] for t in wide)
    yield Case("rope, BSHD", lambda: lz.rope(x, cos, sin), lambda: rotated(x, a, b))
    yield Case("rope, BHSD", lambda: lz.rope(turned, cos, sin, layout="BHSD"), lambda: rotated(turned, *wide))
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(8)])

    def alibi() -> Tensor:
        places = torch.arange(33, device=slopes.device)
        return slopes[:, None, None] * (places - places[:, None])

    yield Case("alibi_bias", lambda: lz.alibi_bias(slopes, 33, 33), alibi, same=False)


def _sampling(made: _Made) -> Iterator[Case]:
    import torch

    logits = made.tensor(made.rows, made.vocabulary).float()
    drafts = torch.zeros(2, 3, dtype=torch.int64)
    draft, target = (torch.rand(2, n, made.vocabulary).softmax(-1) for n in (3, 4))

    def topk() -> Tensor:
        values, ids = logits.topk(20)
        return ids.gather(-1, torch.multinomial(values.softmax(-1), 1))[:, 0]

    def topp() -> Tensor:
        ordered, ids = logits.softmax(-1).sort(-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered > 0.9] = 0.0
        return ids.gather(-1, torch.multinomial(ordered, 1))[:, 0]

    def verified() -> tuple[Tensor, Tensor]:
        p, q = (t.gather(-1, drafts[..., None])[..., 0] for t in (target[:, :-1], draft))
        accepted = (torch.rand_like(p) < p / q).int().cumprod(-1).sum(-1)
        rest = torch.cat([(target[:, :-1] - draft).clamp_min(0), target[:, -1:]], 1)
        chosen = rest.gather(1, accepted[:, None, None].expand(-1, 1, rest.shape[-1]))[:, 0]
        return accepted, torch.multinomial(chosen, 1)

    yield Case("sample_topk", lambda: lz.sample_topk(logits, 20), topk, same=False)
    yield Case("sample_topk, seed", lambda: lz.sample_topk(logits, 20, seed=1), topk, same=False)
    yield Case("sample_topp", lambda: lz.sample_topp(logits, 0.9), topp, same=False)
    yield Case("sample_topp, seed", lambda: lz.sample_topp(logits, 0.9, seed=1), topp, same=False)
    yield Case("speculative_verify", lambda: lz.speculative_verify(drafts, draft, target), verified, same=False)


def _caches(made: _Made) -> Iterator[Case]:
    import torch

    x = made.tensor(made.rows, made.width)

    def quantized() -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round().clamp(-127, 127).to(torch.int8), scale

    values, scale = quantized()
    scale = scale.float()
    keys, cache = made.tensor(2, made.rows, 2, 64), torch.zeros(2, 8, 16, 2, 64, dtype=made.dtype)
    slots = torch.arange(made.rows)
    flat = cache.view(2, 128, 2, 64)

    def appended() -> None:
        flat[0][slots] = keys[0]
        flat[1][slots] = keys[1]

    yield Case("quantize", lambda: lz.quantize(x, "int8", granularity="per_channel"), quantized, same=False)
    yield Case(
        "dequantize",
        lambda: lz.dequantize(values, scale, granularity="per_channel"),
        lambda: values.to(torch.float32) * scale,
        same=False,
    )
    yield Case("kv_append", lambda: lz.kv_append(keys[0], keys[1], cache[0], cache[1], slots), appended)


def agrees(case: Case) -> bool:
    """Whether both sides give the same values, up to rounding; draws are compared by shape alone."""
    import torch

    ours, theirs = (_tensors(call()) for call in (case.lz, case.torch))
    if not case.same:
        return all(torch.isfinite(t.float()).all() for t in ours)
    return all(torch.allclose(a.float(), b.float(), rtol=0.02, atol=0.02) for a, b in zip(ours, theirs, strict=True))


def _tensors(value: Any) -> list[Tensor]:
    import torch

    found = [value] if isinstance(value, torch.Tensor) else list(value or ())
    return [t for t in found if isinstance(t, torch.Tensor) and not math.isnan(t.numel())]
