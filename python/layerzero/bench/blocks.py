"""One decoder block of four model families, each written twice: with LayerZero's functions, and as plain torch code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import layerzero as lz

Weights = dict[str, Tensor]
Block = Callable[[Tensor, Weights, "Sizes"], Tensor]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a block."""

    hidden: int
    heads: int
    kv_heads: int
    inner: int

    @property
    def head_dim(self) -> int:
        """Of one head."""
        return self.hidden // self.heads


def gpt2(x: Tensor, w: Weights, sizes: Sizes) -> Tensor:
    """Norms with a mean, biases, a feed-forward block with gelu."""
    batch, length, hidden = x.shape
    normed = lz.layer_norm(x, None, w["norm"], w["norm_bias"])
    qkv = lz.linear(normed, w["qkv"], w["qkv_bias"]).view(batch, length, 3, sizes.heads, sizes.head_dim)
    query, key, value = (tensor.transpose(1, 2) for tensor in qkv.unbind(2))
    attended = lz.attention(query, key, value, layout="BHSD").transpose(1, 2).reshape(batch, length, hidden)
    x = x + lz.linear(attended, w["out"], w["out_bias"])
    normed = lz.layer_norm(x, None, w["norm2"], w["norm2_bias"])
    inner = lz.gelu(lz.linear(normed, w["up"], w["up_bias"]), "tanh")
    result: Tensor = x + lz.linear(inner, w["down"], w["down_bias"])
    return result


def gpt2_torch(x: Tensor, w: Weights, sizes: Sizes) -> Tensor:
    """The same in torch."""
    batch, length, hidden = x.shape
    normed = F.layer_norm(x, (hidden,), w["norm"], w["norm_bias"])
    qkv = F.linear(normed, w["qkv"], w["qkv_bias"]).view(batch, length, 3, sizes.heads, sizes.head_dim)
    query, key, value = (tensor.transpose(1, 2) for tensor in qkv.unbind(2))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + F.linear(attended.transpose(1, 2).reshape(batch, length, hidden), w["out"], w["out_bias"])
    normed = F.layer_norm(x, (hidden,), w["norm2"], w["norm2_bias"])
    inner = F.gelu(F.linear(normed, w["up"], w["up_bias"]), approximate="tanh")
    return x + F.linear(inner, w["down"], w["down_bias"])


def _split(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int, head_dim: int) -> Tensor:
    projected: Tensor = lz.linear(x, weight, bias)
    return projected.view(*x.shape[:2], heads, head_dim)


def llama(x: Tensor, w: Weights, sizes: Sizes) -> Tensor:
    """Root-mean-square norms, rotary embedding, shared key/value heads, a gated feed-forward block."""
    batch, length, hidden = x.shape
    normed = lz.rms_norm(x, w["norm"])
    query = _split(normed, w["q"], None, sizes.heads, sizes.head_dim)
    key = _split(normed, w["k"], None, sizes.kv_heads, sizes.head_dim)
    value = _split(normed, w["v"], None, sizes.kv_heads, sizes.head_dim)
    query, key = lz.rope(query, w["cos"], w["sin"]), lz.rope(key, w["cos"], w["sin"])
    attended = lz.attention(query, key, value).reshape(batch, length, hidden)
    normed, x = lz.fused_add_rms_norm(lz.linear(attended, w["out"]), x, w["norm2"])
    result: Tensor = x + lz.fused_mlp(normed, w["up"], w["down"], w["gate"])
    return result


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Transformers writes it; heads before the sequence."""
    first, second = x.chunk(2, -1)
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def llama_torch(x: Tensor, w: Weights, sizes: Sizes) -> Tensor:
    """The same in torch."""
    batch, length, hidden = x.shape
    normed = F.rms_norm(x, (hidden,), w["norm"], 1e-6)
    shape = batch, length, -1, sizes.head_dim
    query, key, value = (F.linear(normed, w[name]).view(shape).transpose(1, 2) for name in "qkv")
    query, key = _rotated(query, w["cos"], w["sin"]), _rotated(key, w["cos"], w["sin"])
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    x = x + F.linear(attended.transpose(1, 2).reshape(batch, length, hidden), w["out"])
    normed = F.rms_norm(x, (hidden,), w["norm2"], 1e-6)
    return x + F.linear(F.silu(F.linear(normed, w["gate"])) * F.linear(normed, w["up"]), w["down"])


def qwen(x: Tensor, w: Weights, sizes: Sizes) -> Tensor:
    """As Llama, with queries and keys normalized head by head, and the gate by itself."""
    batch, length, hidden = x.shape
    normed = lz.rms_norm(x, w["norm"])
    query = lz.rms_norm(_split(normed, w["q"], None, sizes.heads, sizes.head_dim), w["q_norm"])
    key = lz.rms_norm(_split(normed, w["k"], None, sizes.kv_heads, sizes.head_dim), w["k_norm"])
    value = _split(normed, w["v"], None, sizes.kv_heads, sizes.head_dim)
    query, key = lz.rope(query, w["cos"], w["sin"]), lz.rope(key, w["cos"], w["sin"])
    attended = lz.attention(query, key, value).reshape(batch, length, hidden)
    x = x + lz.linear(attended, w["out"])
    normed = lz.rms_norm(x, w["norm2"])
    gated = lz.silu_mul(lz.linear(normed, w["gate"]), lz.linear(normed, w["up"]))
    result: Tensor = x + lz.linear(gated, w["down"])
    return result


def qwen_torch(x: Tensor, w: Weights, sizes: Sizes) -> Tensor:
    """The same in torch."""
    batch, length, hidden = x.shape
    normed, width = F.rms_norm(x, (hidden,), w["norm"], 1e-6), (sizes.head_dim,)
    shape = batch, length, -1, sizes.head_dim
    query = F.rms_norm(F.linear(normed, w["q"]).view(shape), width, w["q_norm"], 1e-6).transpose(1, 2)
    key = F.rms_norm(F.linear(normed, w["k"]).view(shape), width, w["k_norm"], 1e-6).transpose(1, 2)
    value = F.linear(normed, w["v"]).view(shape).transpose(1, 2)
    query, key = _rotated(query, w["cos"], w["sin"]), _rotated(key, w["cos"], w["sin"])
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    x = x + F.linear(attended.transpose(1, 2).reshape(batch, length, hidden), w["out"])
    normed = F.rms_norm(x, (hidden,), w["norm2"], 1e-6)
    return x + F.linear(F.silu(F.linear(normed, w["gate"])) * F.linear(normed, w["up"]), w["down"])


#: Of Gemma: scores are capped, and a query sees this many keys before its own.
_SOFTCAP, _WINDOW = 50.0, 511


def gemma(x: Tensor, w: Weights, sizes: Sizes) -> Tensor:
    """Capped scores in a sliding window, norms before and after each part, a feed-forward block gated by gelu."""
    batch, length, hidden = x.shape
    normed = lz.rms_norm(x, w["norm"])
    query = _split(normed, w["q"], None, sizes.heads, sizes.head_dim)
    key = _split(normed, w["k"], None, sizes.kv_heads, sizes.head_dim)
    value = _split(normed, w["v"], None, sizes.kv_heads, sizes.head_dim)
    query, key = lz.rope(query, w["cos"], w["sin"]), lz.rope(key, w["cos"], w["sin"])
    attended = lz.attention(query, key, value, softcap=_SOFTCAP, window=(_WINDOW, 0)).reshape(batch, length, hidden)
    x = x + lz.rms_norm(lz.linear(attended, w["out"]), w["norm"])
    normed = lz.rms_norm(x, w["norm2"])
    gated = lz.gelu(lz.linear(normed, w["gate"]), "tanh") * lz.linear(normed, w["up"])
    result: Tensor = x + lz.rms_norm(lz.linear(gated, w["down"]), w["norm2"])
    return result


def gemma_torch(x: Tensor, w: Weights, sizes: Sizes) -> Tensor:
    """The same in torch."""
    batch, length, hidden = x.shape
    normed = F.rms_norm(x, (hidden,), w["norm"], 1e-6)
    shape = batch, length, -1, sizes.head_dim
    query, key, value = (F.linear(normed, w[name]).view(shape).transpose(1, 2) for name in "qkv")
    query, key = _rotated(query, w["cos"], w["sin"]), _rotated(key, w["cos"], w["sin"])
    key, value = (tensor.repeat_interleave(sizes.heads // sizes.kv_heads, 1) for tensor in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * sizes.head_dim**-0.5
    scores = torch.tanh(scores / _SOFTCAP) * _SOFTCAP
    distance = torch.arange(length, device=x.device)[:, None] - torch.arange(length, device=x.device)
    scores = scores.masked_fill((distance < 0) | (distance > _WINDOW), -torch.inf)
    attended = torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype), value)
    out = F.linear(attended.transpose(1, 2).reshape(batch, length, hidden), w["out"])
    x = x + F.rms_norm(out, (hidden,), w["norm"], 1e-6)
    normed = F.rms_norm(x, (hidden,), w["norm2"], 1e-6)
    gated = F.gelu(F.linear(normed, w["gate"]), approximate="tanh") * F.linear(normed, w["up"])
    return x + F.rms_norm(F.linear(gated, w["down"]), (hidden,), w["norm2"], 1e-6)


#: By family: with LayerZero, in torch, sizes for a small CPU, sizes as published.
FAMILIES: dict[str, tuple[Block, Block, Sizes, Sizes]] = {
    "gpt2": (gpt2, gpt2_torch, Sizes(384, 6, 6, 1536), Sizes(768, 12, 12, 3072)),
    "llama": (llama, llama_torch, Sizes(512, 8, 2, 1408), Sizes(2048, 32, 8, 8192)),
    "qwen": (qwen, qwen_torch, Sizes(384, 6, 2, 1024), Sizes(2048, 16, 8, 6144)),
    "gemma": (gemma, gemma_torch, Sizes(384, 6, 2, 1024), Sizes(2048, 8, 4, 8192)),
}


def weights(sizes: Sizes, length: int, dtype: torch.dtype, device: str) -> Weights:
    """Weights of a block, drawn once and for all."""
    hidden, inner, kv = sizes.hidden, sizes.inner, sizes.kv_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "qkv": (3 * hidden, hidden),
        "q": (hidden, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "out": (hidden, hidden),
        "up": (inner, hidden),
        "gate": (inner, hidden),
        "down": (hidden, inner),
        "qkv_bias": (3 * hidden,),
        "out_bias": (hidden,),
        "up_bias": (inner,),
        "down_bias": (hidden,),
        "norm_bias": (hidden,),
        "norm2_bias": (hidden,),
    }
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    norms = {"norm": hidden, "norm2": hidden, "q_norm": sizes.head_dim, "k_norm": sizes.head_dim}
    made |= {name: torch.ones(size) for name, size in norms.items()}
    angles = torch.arange(length)[:, None] * 1e4 ** -torch.linspace(0.0, 1.0, sizes.head_dim // 2)
    made |= {"cos": angles.cos(), "sin": angles.sin()}
    return {name: tensor.to(device, dtype) for name, tensor in made.items()}
