"""Calls of operations on rows, drawn as in `gpu_cases`: norms, activations, products, positions, sampling, caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_references as references
import layerzero as lz
import reference
import torch
from gpu_cases import FLOATS, HALVES, Call, Draw, Want, by_plain
from torch import Tensor

MARGIN = 1e-5
"""How far a draw must be from another one: half-width probabilities and sums in float32 are off by less."""


def _rows(draw: Draw) -> tuple[int, ...]:
    return draw.one(((1,), (7,), (3, 5), (2, 128), (1000,)))


def norms(draw: Draw) -> Call:
    """Root-mean-square and layer norms, with and without weights, with and without a residual."""
    dtype, width = draw.one(FLOATS), draw.one((1, 8, 33, 64, 128, 1000, 1024, 4096, 8192))
    shape, kind = (*_rows(draw), width), draw.one(("rms_norm", "layer_norm", "fused_add_rms_norm"))
    kwargs: dict[str, Any] = {"input": draw.floats(*shape, dtype=dtype), "eps": draw.one((1e-6, 1e-5, 1e-3))}
    same = draw.random.random() < 0.8
    if draw.random.random() < 0.8:
        kwargs["weight"] = draw.floats(width, dtype=dtype if same else draw.one(FLOATS))
    if kind == "fused_add_rms_norm":
        kwargs["residual"] = draw.floats(*shape, dtype=dtype)
    if kind != "layer_norm":
        return by_plain(kind, kwargs)
    if draw.random.random() < 0.6:
        kwargs["bias"] = draw.floats(width, dtype=dtype if same else draw.one(FLOATS))
    x = kwargs["input"].double()
    spread = (x.var(-1, unbiased=False, keepdim=True) + kwargs["eps"]).sqrt()
    size = (x - x.mean(-1, keepdim=True)).abs() / spread
    growth = x.abs().sum(-1, keepdim=True) / spread * (1.0 + size)
    weight = kwargs.get("weight")
    return by_plain(kind, kwargs, growth if weight is None else growth * weight.double().abs())


def activations(draw: Draw) -> Call:
    """Gated SiLU and GELU."""
    dtype, shape = draw.one(FLOATS), (*_rows(draw), draw.one((1, 7, 64, 1000, 11008)))
    if draw.random.random() < 0.5:
        gate, up = (draw.floats(*shape, dtype=dtype, bound=draw.one((1.5, 6.0))) for _ in range(2))
        return by_plain("silu_mul", {"gate": gate, "up": up})
    kwargs = {"input": draw.floats(*shape, dtype=dtype, bound=4.0), "approximate": draw.one(("none", "tanh"))}
    return by_plain("gelu", kwargs)


def products(draw: Draw) -> Call:
    """Matrix products and feed-forward blocks, with weights as models have them."""
    dtype, hidden = draw.one(FLOATS), draw.one((8, 33, 64, 512, 1024))
    rows, out = draw.one(((1,), (5,), (2, 64), (300,))), draw.one((16, 100, 1024, 1408))
    x = draw.floats(*rows, hidden, dtype=dtype)
    if draw.random.random() < 0.6:
        kwargs: dict[str, Any] = {"input": x, "weight": draw.weights(out, hidden, dtype=dtype)}
        if draw.random.random() < 0.5:
            kwargs["bias"] = draw.floats(out, dtype=dtype)
        return Call("linear", kwargs, [Want(*references.linear(**kwargs))])
    if draw.random.random() < 0.4:
        weight = draw.weights(out, hidden, dtype=torch.float32)
        packed = lz.pack(weight, dtype=draw.one(("int8", "int4")), group=draw.one((None, 32, 128)))
        kwargs = {"input": x, "weight": packed.blocks, "scales": packed.scales, "out_features": out}
        kwargs |= {"interleave": packed.interleave, "group_size": packed.group}
        return Call("linear_quantized", kwargs, [Want(*references.linear(x, packed.unpack()))])
    kwargs = {"input": x, "activation": draw.one(("silu", "gelu", "relu"))}
    kwargs["up_weight"], kwargs["down_weight"] = (draw.weights(*s, dtype=dtype) for s in ((out, hidden), (hidden, out)))
    if draw.random.random() < 0.7:
        kwargs["gate_weight"] = draw.weights(out, hidden, dtype=dtype)
    # Each of the sums over both widths, carried through slopes of at most 1.2.
    return by_plain("fused_mlp", kwargs, 8.0 * (hidden + out))


def positions(draw: Draw) -> Call:
    """Rotary embeddings, linear biases, embeddings."""
    dtype, kind = draw.one(FLOATS), draw.one(("rope", "rope", "rope", "alibi", "embedding"))
    if kind == "alibi":
        slopes = draw.floats(draw.one((1, 8, 32)), dtype=dtype)
        return by_plain("alibi_bias", {"slopes": slopes, "seq_q": draw.one((1, 5, 64)), "seq_k": draw.one((1, 64, 90))})
    if kind == "embedding":
        weight = draw.floats(draw.one((3, 1000)), draw.one((1, 64, 1024)), dtype=dtype)
        indices = draw.ints(draw.integers(0, weight.shape[0], *draw.one(((1,), (4, 9), (300,)))))
        return Call(
            "embedding", {"indices": indices, "weight": weight}, [Want(weight.double()[indices.long()], 0.0, True)]
        )
    layout, head_dim = draw.one(("BSHD", "BHSD")), draw.one((8, 64, 128))
    batch, seq, heads = draw.one((1, 2)), draw.one((1, 5, 130)), draw.one((1, 8, 32))
    shape = (batch, seq, heads, head_dim) if layout == "BSHD" else (batch, heads, seq, head_dim)
    table, turned = seq + draw.one((0, 9)), draw.one((head_dim // 2, head_dim // 2, head_dim // 4))
    angles = draw.floats(table, turned, dtype=torch.float64, bound=3.0)
    narrow = draw.one((dtype, torch.float32))
    kwargs: dict[str, Any] = {"cos": angles.cos().to(narrow), "sin": angles.sin().to(narrow), "layout": layout}
    kwargs |= {"input": draw.floats(*shape, dtype=dtype), "interleaved": draw.one((False, True))}
    if draw.random.random() < 0.5:
        kwargs["positions"] = draw.ints(draw.integers(0, table, *draw.one(((seq,), (batch, seq)))))
    return by_plain("rope", kwargs)


def _numpy(tensor: Tensor) -> Any:
    return tensor.double().cpu().numpy() if tensor.is_floating_point() else tensor.cpu().numpy()


def sampling(draw: Draw) -> Call:
    """Draws with given numbers; those too near to another draw are drawn again."""
    while True:
        dtype, rows = draw.one((torch.float32, *HALVES)), draw.one((1, 3, 16))
        kind, vocab = draw.one(("sample_topk", "sample_topp", "speculative_verify")), draw.one((5, 100, 1000, 32000))
        if kind == "speculative_verify":
            call, margin = _speculative(draw, min(vocab, 1000), rows)
        else:
            logits = draw.floats(rows, vocab, dtype=dtype, bound=draw.one((1.5, 8.0)))
            if draw.random.random() < 0.3:
                # Equal ones are common, and the lower index goes first.
                logits = (logits * 2.0).round() / 2.0
            uniform = torch.rand(rows, dtype=torch.float64, device=draw.device)
            chosen = (
                {"k": draw.one((1, 5, 50, 3000))} if kind == "sample_topk" else {"p": draw.one((0.1, 0.7, 0.95, 1.0))}
            )
            ids, margin = getattr(reference, kind)(_numpy(logits), *chosen.values(), _numpy(uniform))
            kwargs = {"logits": logits, **chosen, "uniform": uniform.to(draw.one((torch.float32, torch.float64)))}
            call = Call(kind, kwargs, [Want(torch.from_numpy(ids), 0.0, True)])
        if margin > MARGIN / max(vocab / 100, 1):
            return call


def _speculative(draw: Draw, vocab: int, batch: int) -> tuple[Call, float]:
    draft = draw.one((1, 3, 8))
    draft_probs, target = (
        torch.softmax(draw.floats(batch, n, vocab, dtype=torch.float32), -1) for n in (draft, draft + 1)
    )
    kwargs = {
        "draft_ids": draw.ints(draw.integers(0, vocab, batch, draft)),
        "draft_probs": draft_probs,
        "target_probs": target,
        "uniform": torch.rand(batch, draft + 1, device=draw.device),
    }
    ids, accepted, margin = reference.speculative_verify(*(_numpy(t) for t in kwargs.values()))
    results = [Want(torch.from_numpy(t), 0.0, True) for t in (ids, accepted)]
    return Call("speculative_verify", kwargs, results), margin


#: Formats that say how many elements share a scale.
OWN_GROUP = {"mxfp4": 32, "nvfp4": 16}


def quantizing(draw: Draw) -> Call:
    """Rounding to 8 or 4 bits and back; the reference on the CPU says what is right, to the last bit."""
    form = draw.one(("int8", "fp8_e4m3", "fp8_e5m2", "int4", "mxfp4", "nvfp4"))
    granularity = "blockwise" if form in OWN_GROUP else draw.one(("per_tensor", "per_channel", "blockwise"))
    rows, columns = draw.one((1, 5, 64)), draw.one((32, 64, 100, 512))
    common: dict[str, Any] = {"granularity": granularity}
    if granularity == "blockwise":
        common["group_size"] = OWN_GROUP.get(form) or draw.one((16, 32))
    whole = form in ("int8", "int4")
    if draw.random.random() < 0.5:
        kwargs = {
            "input": draw.floats(rows, columns, dtype=draw.one(FLOATS), bound=draw.one((0.1, 3.0))),
            "dtype": form,
        }
        if whole and draw.random.random() < 0.4:
            kwargs["zero_point"] = True
        return Call("quantize", {**kwargs, **common})
    groups = -(-columns // common["group_size"]) if granularity == "blockwise" else 1
    scales = draw.floats(1 if granularity == "per_tensor" else rows, groups, dtype=torch.float32).abs() + 0.01
    values = draw.integers(-127, 128, rows, columns).to(torch.int8)
    if form.startswith("fp8"):
        dtype = torch.float8_e4m3fn if form == "fp8_e4m3" else torch.float8_e5m2
        values = draw.floats(rows, columns, dtype=torch.float32, bound=400.0).to(dtype)
    elif form != "int8":
        values, common["format"] = draw.integers(0, 256, rows, columns // 2).to(torch.uint8), form
    kwargs = {"values": values, "scales": scales, "dtype": draw.one(("float32", "float16", "bfloat16"))}
    if whole and draw.random.random() < 0.4:
        kwargs["zero_points"] = draw.integers(-20, 20, *scales.shape).int()
    return Call("dequantize", {**kwargs, **common})


def caches(draw: Draw) -> Call:
    """Writing to and moving pages, duplicates and padding included."""
    dtype, layout = draw.one((*HALVES, torch.float32)), draw.one(("NHD", "HND"))
    pages, size, heads, width = draw.one((3, 20)), draw.one((1, 16)), draw.one((1, 8)), draw.one((8, 64, 128))
    shape = (pages, size, heads, width) if layout == "NHD" else (pages, heads, size, width)
    stored = draw.one((dtype, dtype, torch.float8_e4m3fn, torch.float8_e5m2))
    both = {name: draw.floats(*shape, dtype=torch.float32).to(stored) for name in ("key_cache", "value_cache")}
    updated = tuple(both)
    if draw.random.random() < 0.35:
        moves = draw.ints(draw.integers(0, pages, draw.one((1, 4)), 2))
        return Call("kv_compact", {**both, "moves": moves, "layout": layout}, None, updated)
    tokens = draw.one((1, 5, 40))
    slots = draw.integers(draw.one((-4, 0, -1)), pages * size, tokens)
    if draw.random.random() < 0.1:
        slots = torch.full_like(slots, -1)
    kwargs = {"slot_mapping": draw.ints(slots), "layout": layout}
    new = {name: draw.floats(tokens, heads, width, dtype=dtype) for name in ("key", "value")}
    return Call("kv_append", {**new, **both, **kwargs}, None, updated)


FAMILIES: dict[str, tuple[Callable[[Draw], Call], int]] = {
    "norms": (norms, 260),
    "activations": (activations, 140),
    "products": (products, 140),
    "positions": (positions, 160),
    "sampling": (sampling, 180),
    "quantizing": (quantizing, 300),
    "caches": (caches, 120),
}
