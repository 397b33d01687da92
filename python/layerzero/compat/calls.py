"""A small call for each kernel: sizes that suit its operation, bent until the kernel takes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from layerzero import _native
from layerzero.errors import LayerZeroError
from layerzero.tuning.api import workload

#: Small sizes by operation, the most special name first. Of several the first that a kernel takes is used.
SIZES: tuple[tuple[str, tuple[dict[str, int], ...]], ...] = (
    (
        "attention.standard.prefill.paged",
        (
            {"batch": 2, "seq_q": 32, "heads": 4, "head_dim": 64},
            {"batch": 2, "seq_q": 32, "seq_k": 64, "heads": 4, "head_dim": 64, "shared_prefix": 32},
        ),
    ),
    (
        "attention.gqa.prefill.paged",
        (
            {"batch": 2, "seq_q": 32, "heads": 8, "head_dim": 64},
            {"batch": 2, "seq_q": 32, "seq_k": 64, "heads": 8, "head_dim": 64, "shared_prefix": 32},
        ),
    ),
    (
        "attention.standard.decode.paged",
        (
            {"batch": 2, "seq_k": 64, "heads": 4, "head_dim": 64},
            {"batch": 2, "seq_k": 64, "heads": 4, "head_dim": 64, "shared_prefix": 32},
        ),
    ),
    (
        "attention.gqa.decode.paged",
        (
            {"batch": 2, "seq_k": 64, "heads": 8, "head_dim": 64},
            {"batch": 2, "seq_k": 64, "heads": 8, "head_dim": 64, "shared_prefix": 32},
        ),
    ),
    ("attention.standard.prefill.varlen", ({"batch": 2, "seq_q": 64, "heads": 4, "head_dim": 64},)),
    ("attention.gqa.prefill.varlen", ({"batch": 2, "seq_q": 64, "heads": 8, "head_dim": 64},)),
    ("attention.lse.paged", ({"batch": 2, "seq_q": 2, "seq_k": 64, "heads": 8, "head_dim": 64},)),
    ("attention.lse.varlen", ({"batch": 2, "seq_q": 64, "heads": 8, "head_dim": 64},)),
    ("attention.lse", ({"batch": 1, "seq_q": 64, "seq_k": 64, "heads": 8, "head_dim": 64},)),
    ("attention.merge", ({"rows": 16, "v_dim": 64},)),
    ("attention.mla.prefill.paged", ({"batch": 2, "seq_q": 4, "seq_k": 64, "heads": 16},)),
    ("attention.mla.decode.paged", ({"batch": 2, "seq_k": 64, "heads": 16}, {"batch": 2, "seq_k": 64, "heads": 128})),
    ("attention.mla.decode", ({"seq_k": 64, "heads": 16}, {"seq_k": 64, "heads": 128})),
    ("attention.mla", ({"seq_q": 16, "seq_k": 16, "heads": 16}, {"seq_q": 16, "seq_k": 16, "heads": 128})),
    ("attention.sparse", ({"seq_q": 128, "seq_k": 128, "heads": 4, "kv_heads": 2, "head_dim": 64},)),
    ("attention.cross.decode", ({"batch": 1, "seq_k": 64, "heads": 4, "head_dim": 64},)),
    ("attention.cross", ({"batch": 1, "seq_q": 32, "seq_k": 64, "heads": 4, "head_dim": 64},)),
    ("attention.standard.decode", ({"batch": 1, "seq_k": 64, "heads": 4, "head_dim": 64},)),
    ("attention.gqa.decode", ({"batch": 1, "seq_k": 64, "heads": 8, "head_dim": 64},)),
    (
        "attention",
        (
            {"batch": 1, "seq_q": 64, "seq_k": 64, "heads": 8, "head_dim": 64},
            {"batch": 1, "seq_q": 32, "seq_k": 64, "heads": 8, "head_dim": 64},
        ),
    ),
    ("embedding", ({"rows": 8, "vocab": 64, "hidden": 64},)),
    ("posenc.rope", ({"batch": 1, "seq": 16, "heads": 4, "head_dim": 64},)),
    ("posenc.alibi", ({"seq_q": 16, "seq_k": 16, "heads": 4},)),
    ("norm", ({"rows": 8, "hidden": 256}, {"rows": 1, "hidden": 256}, {"rows": 256, "hidden": 1024})),
    (
        "mlp.linear",
        ({"rows": 8, "in_features": 64, "out_features": 64}, {"rows": 1, "in_features": 64, "out_features": 64}),
    ),
    ("mlp.linear.packed", ({"rows": 8, "in_features": 64, "out_features": 64, "interleave": 1},)),
    ("mlp.linear.quantized", ({"rows": 8, "in_features": 64, "out_features": 64, "interleave": 1, "group_size": 0},)),
    ("mlp.fused", ({"rows": 8, "hidden": 64, "intermediate": 128}, {"rows": 256, "hidden": 64, "intermediate": 256})),
    ("activation", ({"rows": 8, "width": 256}, {"rows": 256, "width": 1024})),
    ("sampling.speculative", ({"batch": 2, "vocab": 64},)),
    ("sampling.topk", ({"rows": 4, "vocab": 256, "k": 8},)),
    ("sampling", ({"rows": 4, "vocab": 256},)),
    ("quantize", ({"rows": 8, "cols": 256},)),
    ("dequantize", ({"rows": 8, "cols": 256},)),
    ("kv_cache.append", ({"tokens": 8, "kv_heads": 2, "head_dim": 64},)),
    ("kv_cache", ({"num_blocks": 8, "kv_heads": 2, "head_dim": 64},)),
)
#: In which order dtypes are tried; what is not here comes after.
DTYPES = ("float32", "float16", "bfloat16")


def _targets() -> dict[str, list[str]]:
    """The operations behind the names of families."""
    return {function["target"]: list(function["ops"]) for function in _native.functions()}


def candidates(kernel: Mapping[str, Any], operation: str) -> Iterator[dict[str, Any]]:
    """Calls to try on a kernel (as its document describes it), the likeliest first."""
    ops = _targets().get(operation, [operation])
    dtypes = sorted(kernel["dtypes"], key=lambda name: DTYPES.index(name) if name in DTYPES else len(DTYPES))
    params = _params(kernel)
    layouts = [None, *(name for name in kernel["requires_layouts"] if name.isupper())]
    for op, dtype, layout in itertools.product(ops, dtypes, layouts):
        for sizes, chosen in itertools.product(_sizes(op, kernel.get("dims", {})), params):
            try:
                made = workload(op, dtype=dtype, layout=layout, params=chosen, **sizes)
            except LayerZeroError:
                # A size the operation does not have, or a dtype it does not know.
                continue
            for call in made:
                yield from _inputs(call, kernel)


def _sizes(op: str, rules: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    points = next((points for name, points in SIZES if op == name or op.startswith(name + ".")), ({},))
    for point in points:
        sizes = {name: _fitting(size, rules.get(name, {})) for name, size in point.items()}
        special = {name: rule for name, rule in rules.items() if name not in point and _is_special(rule)}
        yield dict(sizes)
        if special:
            sizes |= {name: _fitting(1, rule) for name, rule in special.items()}
            if "block_size" in special and "seq_k" in sizes:
                # Contexts are given in whole pages.
                sizes["seq_k"] = max(sizes["seq_k"], sizes["block_size"])
            yield dict(sizes)


def _is_special(rule: Mapping[str, Any]) -> bool:
    return bool(rule.get("one_of")) or (rule.get("multiple_of") or 1) > 1 or (rule.get("min") or 0) > 1


def _fitting(size: int, rule: Mapping[str, Any]) -> int:
    if choices := rule.get("one_of"):
        return int(size if size in choices else min(choices))
    size = max(size, rule.get("min") or size)
    step = rule.get("multiple_of") or 1
    size = -(-size // step) * step
    return int(min(size, rule.get("max") or size))


def _params(kernel: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As they usually are, and as the kernel wants them."""
    wanted = {name: rule["one_of"][0] for name, rule in kernel.get("params", {}).items() if rule.get("one_of")}
    full = {"causal": False} if "causal" in kernel.get("params", {}) else {}
    return [{}, *([wanted] if wanted else []), *([full | wanted] if full else [])]


def _inputs(call: dict[str, Any], kernel: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The call; with the dtypes its kernel wants of some inputs; with a mask."""
    yield call
    tensors, rules = call["tensors"], kernel.get("inputs", {})
    fixed = {name: rule["dtypes"][0] for name, rule in rules.items() if name in tensors and rule.get("dtypes")}
    if fixed:
        yield call | {"tensors": tensors | {n: tensors[n] | {"dtype": dtype} for n, dtype in fixed.items()}}
    if "attn_mask" in rules and "key" in tensors:
        head_first = call.get("layout") == "BHSD"
        queries, keys = (tensors[name]["shape"][2 if head_first else 1] for name in ("query", "key"))
        mask = {"attn_mask": {"dtype": "bool", "shape": [queries, keys]}}
        given = call.get("params", {})
        causal = {} if "cross" in call["op"] else {"causal": False}
        yield call | {"tensors": tensors | mask, "params": given | causal}
