"""Dense attention: standard, grouped-query and cross."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .case import (
    INF,
    NAN,
    Case,
    Draw,
    Expected,
    Tensor,
    every_other,
    expanded,
    padded_rows,
    tensor,
    transposed,
    with_value,
)
from .number import FLOATS_AND_FP8, dot, exp, tanh, total


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    allowed: np.ndarray,
    *,
    scale: float,
    softcap: float = 0.0,
    bias: np.ndarray | None = None,
    sink: float = -INF,
) -> np.ndarray:
    """One head: queries [s, d], keys [t, d], values [t, e], which key each query may see [s, t]; a score without a value."""
    out = np.zeros((q.shape[0], v.shape[1]))
    for i in range(q.shape[0]):
        keys = [j for j in range(k.shape[0]) if allowed[i, j] and (bias is None or bias[i, j] != -INF)]
        if not keys:
            continue
        scores = [scale * dot(q[i], k[j]) for j in keys]
        if softcap > 0:
            scores = [softcap * tanh(s / softcap) for s in scores]
        if bias is not None:
            scores = [s + float(bias[i, j]) for s, j in zip(scores, keys, strict=True)]
        if any(map(math.isnan, scores)):
            out[i] = NAN
            continue
        top = max(*scores, sink)
        weights = [exp(s - top) for s in scores]
        rest = exp(sink - top) if sink != -INF else 0.0
        norm = total([*weights, rest])
        assert abs(total(w / norm for w in [*weights, rest]) - 1) < 1e-14
        out[i] = [dot(weights, v[keys, e]) / norm for e in range(v.shape[1])]
    return out


def reachable(seq_q: int, seq_k: int, causal: bool, left: int, right: int) -> np.ndarray:
    """Which keys the causal bound and the window leave, [seq_q, seq_k], aligned bottom-right."""
    stands_at = np.arange(seq_q)[:, None] + seq_k - seq_q
    key = np.arange(seq_k)[None, :]
    allowed = np.ones((seq_q, seq_k), dtype=bool)
    if causal:
        allowed &= key <= stands_at
    if left >= 0:
        allowed &= key >= stands_at - left
    if right >= 0:
        allowed &= key <= stands_at + right
    return allowed


def dense(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: Tensor | None = None,
    slopes: np.ndarray | None = None,
    *,
    causal: bool,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """BSHD in, BSHD out."""
    batch, seq_q, heads, dim = q.shape
    seq_k, kv_heads = k.shape[1], k.shape[2]
    out = np.zeros((batch, seq_q, heads, v.shape[3]))
    within = reachable(seq_q, seq_k, causal, window_left, window_right)
    distance = np.abs(np.arange(seq_q)[:, None] + seq_k - seq_q - np.arange(seq_k)[None, :])
    full = None if mask is None else np.broadcast_to(mask.values, (batch, heads, seq_q, seq_k))
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            allowed, bias = within, np.zeros((seq_q, seq_k))
            if slopes is not None:
                bias = bias - slopes[h] * distance
            if full is not None and mask is not None and mask.dtype == "bool":
                allowed = allowed & (full[b, h] != 0)
            elif full is not None:
                bias = bias + full[b, h]
            out[b, :, h] = attend(
                q[b, :, h],
                k[b, :, kv],
                v[b, :, kv],
                allowed,
                softcap=softcap,
                bias=bias,
                scale=1 / math.sqrt(dim) if scale is None else scale,
                sink=-INF if sinks is None else float(sinks[h]),
            )
    return out


class Dense:
    """Writes the cases of one dense operation."""

    def __init__(self, op: str, heads: int, kv_heads: int, seq_q: int | None = None, seq_k: int = 4) -> None:
        self.op, self.heads, self.kv_heads = op, heads, kv_heads
        self.decode = op.endswith("decode")
        self.cross = ".cross." in op
        self.seq_q = seq_q if seq_q is not None else (1 if self.decode else seq_k)
        self.seq_k = seq_k

    def case(
        self,
        name: str,
        dtype: str = "float32",
        *,
        batch: int = 1,
        seq_q: int | None = None,
        seq_k: int | None = None,
        dim: int = 4,
        v_dim: int | None = None,
        heads: tuple[int, int] | None = None,
        layout: str | None = "BSHD",
        call: str | None = None,
        full_precision: bool = False,
        mask: Tensor | None = None,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        edit: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
        view: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
        **params: Any,
    ) -> Case:
        """`edit` changes the BSHD tensors, `view` how the tensors lie in memory."""
        seq_q = self.seq_q if seq_q is None else seq_q
        seq_k = self.seq_k if seq_k is None else seq_k
        h, kv = heads or (self.heads, self.kv_heads)
        draw = Draw(self.op, name)
        fill = draw.floats if full_precision else draw.coarse
        inputs = {
            "query": fill(dtype, batch, seq_q, h, dim),
            "key": fill(dtype, batch, seq_k, kv, dim),
            "value": fill(dtype, batch, seq_k, kv, v_dim or dim),
        }
        inputs = edit(inputs) if edit else inputs
        fixed = {"attention.causal": True, "attention.full": False}
        known = {"causal": fixed.get(call or "", not self.cross)} | params
        known.pop("dropout_p", None)
        out = dense(
            inputs["query"].values,
            inputs["key"].values,
            inputs["value"].values,
            mask,
            slopes.values if slopes else None,
            sinks=None if sinks is None else sinks.values,
            **known,
        )
        if layout == "BHSD":
            inputs = {n: tensor(dtype, t.values.swapaxes(1, 2)) for n, t in inputs.items()}
            out = out.swapaxes(1, 2)
        inputs = view(inputs) if view else inputs
        if mask is not None:
            inputs["attn_mask"] = mask
        if slopes is not None:
            inputs["alibi_slopes"] = slopes
        if sinks is not None:
            inputs["sinks"] = sinks
        return Case(name, call or self.op, inputs, {"output": Expected(dtype, out)}, params, layout)

    def dtypes(self) -> Iterator[Case]:
        few = min(self.seq_q, 2)
        for dtype in FLOATS_AND_FP8:
            yield self.case(f"{dtype}_bshd", dtype, batch=2, seq_q=few, seq_k=few + 1, full_precision=True)
            yield self.case(f"{dtype}_bhsd", dtype, seq_q=few, seq_k=4, dim=8, layout="BHSD")

    def masks(self) -> Iterator[Case]:
        t = self.seq_k
        off: dict[str, Any] = {} if self.cross else {"causal": False}
        keep, added, cut = self._masks()
        nothing = cut.values.copy()
        nothing[:, 0] = -INF
        yield self.case("mask_bool", batch=2, mask=keep, **off)
        yield self.case("mask_bool_rank_2_one_row", mask=tensor("bool", [[1, 0] + [1] * (t - 2)]), **off)
        yield self.case(
            "mask_over_heads", "bfloat16", batch=2, layout="BHSD", mask=tensor("bool", keep.values[:, :1]), **off
        )
        yield self.case(
            "mask_bool_nothing_left",
            batch=2,
            mask=tensor("bool", np.concatenate([keep.values[:1] * 0, keep.values[1:]])),
            **off,
        )
        yield self.case("mask_float16_on_float32_rank_2", mask=tensor("float16", added.values[0, 0]), **off)
        yield self.case("mask_float32_on_bfloat16", "bfloat16", mask=added, **off)
        yield self.case("mask_float_minus_infinity_gaps", mask=every_other(cut), **off)
        yield self.case("mask_float_nothing_left", mask=tensor("float32", nothing), **off)

    def more_masks(self) -> Iterator[Case]:
        keep, added, cut = self._masks()
        for name, dtype, mask in [
            ("mask_bool_rank_2", "float32", tensor("bool", keep.values[0, 0])),
            ("mask_over_batch", "float16", tensor("bool", keep.values[:1])),
            ("mask_over_all_but_keys", "float32", tensor("bool", keep.values[:1, :1, :1])),
            ("mask_bool_expanded_view", "float32", expanded(tensor("bool", keep.values[:, :1]), 1, self.heads)),
        ]:
            yield self.case(name, dtype, batch=1 if "rank_2" in name else 2, mask=mask, causal=False)
        for name, dtype, mask in [
            ("mask_float", "float32", added),
            ("mask_float64_on_float32", "float32", tensor("float64", added.values)),
            ("mask_bfloat16_on_bfloat16", "bfloat16", tensor("bfloat16", added.values)),
            ("mask_float32_on_fp8", "float8_e4m3fn", added),
            ("mask_float_minus_infinity", "float32", cut),
        ]:
            yield self.case(name, dtype, mask=mask, causal=False)

    def _masks(self) -> tuple[Tensor, Tensor, Tensor]:
        """A boolean mask for a batch of two, one to add for a batch of one, and the latter with minus infinities."""
        draw = Draw(self.op, "masks")
        keep = draw.bools(2, self.heads, self.seq_q, self.seq_k)
        keep.values[..., 0] = 1
        added = draw.coarse("float32", 1, self.heads, self.seq_q, self.seq_k, bound=2.0)
        return keep, added, tensor("float32", np.where(keep.values[:1] != 0, added.values, -INF))

    def edges(self) -> Iterator[Case]:
        s, t = self.seq_q, self.seq_k
        off: dict[str, Any] = {} if self.cross else {"causal": False}
        yield self.case("scale", scale=0.25)
        yield self.case("softcap", softcap=0.75)
        yield self.case("softcap_and_scale", "float64", softcap=2.0, scale=1.5)
        yield self.case("v_dim_smaller", v_dim=3)
        yield self.case("v_dim_larger", v_dim=6, layout="BHSD")
        yield self.case("dropout_zero", dropout_p=0.0)
        # Scores up to about 200, exact in float32, so the largest must be subtracted first.
        yield self.case("large_scores", scale=32.0, dim=8)
        # With fewer keys torch's own kernel on the CPU gives zeros.
        yield self.case("nan_query", seq_k=16, edit=lambda x: x | {"query": with_value(x["query"], (0, 0, 1, 0), NAN)})
        yield self.case("nan_key", batch=2, edit=lambda x: x | {"key": with_value(x["key"], (0, t - 1, 0, 1), NAN)})
        yield self.case(
            "nan_value", "bfloat16", edit=lambda x: x | {"value": with_value(x["value"], (0, 1, 0, 2), NAN)}
        )
        yield self.case(
            "nan_value_fp8", "float8_e4m3fn", edit=lambda x: x | {"value": with_value(x["value"], (0, 1, 0, 2), NAN)}
        )
        yield self.case("no_keys", seq_k=0, **off)
        yield self.case("no_batch", batch=0)
        yield self.case("one_key", seq_k=1, **({} if self.decode else off))
        yield self.case(
            "query_transposed_key_gaps_value_offset",
            view=lambda x: {
                "query": transposed(x["query"], 1, 2),
                "key": every_other(x["key"]),
                "value": padded_rows(x["value"]),
            },
        )
        yield self.case(
            "all_transposed_bhsd",
            "float16",
            batch=2,
            layout="BHSD",
            view=lambda x: {n: transposed(v, 1, 2) for n, v in x.items()},
        )
        yield self.case("key_stored_dim_major", "bfloat16", view=lambda x: x | {"key": transposed(x["key"], 1, 3)})
        if s != 1:
            yield self.case("no_queries", seq_q=0)

    def bounds(self) -> Iterator[Case]:
        """Causal, windows and slopes: what cross attention does not have."""
        slopes = tensor("float32", [2.0 ** -(i + 1) for i in range(self.heads)])
        yield self.case("full", causal=False)
        yield self.case("window_left_1", window_left=1)
        yield self.case("window_left_0", window_left=0)
        yield self.case("window_left_full", causal=False, window_left=1)
        yield self.case("window_wider_than_keys", window_left=100, window_right=100, causal=False)
        yield self.case("alibi", slopes=slopes)
        yield self.case("alibi_full", causal=False, slopes=slopes, seq_k=6)
        yield self.case("alibi_bfloat16", "bfloat16", slopes=tensor("bfloat16", slopes.values))
        yield self.case("alibi_float32_on_bfloat16_bhsd", "bfloat16", slopes=slopes, layout="BHSD")
        yield self.case(
            "everything",
            "float64",
            causal=False,
            slopes=tensor("float64", slopes.values),
            scale=0.7,
            softcap=1.25,
            window_left=2,
            window_right=1,
            layout="BHSD",
            mask=tensor("float64", [[0.5, -1.0, -INF, 0.25]]),
        )
        sinks = tensor("float32", [0.5 * i - 0.25 for i in range(self.heads)])
        yield self.case("sinks", sinks=sinks)
        yield self.case("sinks_full_bhsd", causal=False, sinks=sinks, layout="BHSD", seq_k=18)
        yield self.case("sinks_bfloat16", "bfloat16", sinks=tensor("bfloat16", sinks.values), window_left=2)
        yield self.case("sinks_float32_on_float16", "float16", sinks=sinks)
        yield self.case("sinks_alone_count", sinks=tensor("float32", [90.0] * self.heads))
        yield self.case("sinks_none", sinks=tensor("float32", [-INF] * self.heads))
        yield self.case(
            "sinks_and_everything",
            "float64",
            causal=False,
            sinks=tensor("float64", sinks.values),
            slopes=tensor("float64", slopes.values),
            scale=0.7,
            softcap=1.25,
            window_left=2,
            mask=tensor("float64", [[0.5, -1.0, -INF, 0.25]]),
        )
        yield self.case("mask_and_window", causal=False, window_left=2, mask=tensor("bool", [[1, 1, 0, 1]]))
        if self.decode:
            return
        yield self.case("causal_square", seq_q=4)
        yield self.case("causal_more_keys", seq_q=3, seq_k=6)
        yield self.case("causal_more_keys_bhsd_bfloat16", "bfloat16", seq_q=2, seq_k=7, layout="BHSD")
        yield self.case("full_more_queries", seq_q=6, seq_k=3, causal=False)
        yield self.case("window_left_more_keys", seq_q=3, seq_k=6, window_left=2)
        yield self.case("window_left_more_queries", seq_q=6, seq_k=3, causal=False, window_left=1)
        yield self.case("window_right_1", causal=False, window_right=1)
        yield self.case("window_right_under_causal", window_right=2)
        yield self.case("window_both", "float16", seq_q=5, seq_k=6, causal=False, window_left=1, window_right=1)
        yield self.case("window_only_aligned", causal=False, window_left=0, window_right=0)
        yield self.case("window_nothing_left", seq_q=6, seq_k=3, causal=False, window_left=0, window_right=0)
        yield self.case("window_right_more_queries", seq_q=5, seq_k=3, causal=False, window_right=0)
        yield self.case("alibi_more_keys", seq_q=2, seq_k=5, slopes=slopes)
        yield self.case(
            "nan_key_behind_the_causal_bound", edit=lambda x: x | {"key": with_value(x["key"], (0, 3, 0, 1), NAN)}
        )
        yield self.case(
            "nan_value_behind_the_causal_bound", edit=lambda x: x | {"value": with_value(x["value"], (0, 3, 0, 1), NAN)}
        )
        yield self.case(
            "nan_outside_the_window",
            window_left=1,
            edit=lambda x: {n: v if n == "query" else with_value(v, (0, 1, 0, 0), NAN) for n, v in x.items()},
        )
        yield self.case(
            "nan_query_with_nothing_to_attend",
            seq_q=5,
            seq_k=3,
            causal=False,
            window_right=0,
            edit=lambda x: x | {"query": with_value(x["query"], (0, 0, 0, 0), NAN)},
        )


def _aliases(of: Dense) -> Iterator[Case]:
    yield of.case("alias_attention", call="attention", batch=2)
    yield of.case("alias_causal", call="attention.causal", seq_k=5)
    yield of.case("alias_full", call="attention.full", seq_k=5, mask=tensor("bool", [[1, 0, 1, 1, 0]]))
    yield of.case("alias_causal_named_twice", call="attention.causal", causal=True)


def _standard_prefill() -> Iterator[Case]:
    of = Dense("attention.standard.prefill", 2, 2, seq_q=3, seq_k=4)
    yield from of.dtypes()
    yield from of.edges()
    yield from of.bounds()
    yield from of.masks()
    yield from of.more_masks()
    yield of.case("one_head", heads=(1, 1))
    yield of.case("three_heads", heads=(3, 3), seq_q=2, seq_k=2, layout="BHSD")
    yield from _aliases(of)
    # Nothing says the layout: it is BSHD, whatever the strides and sizes are.
    yield of.case(
        "layout_not_said_transposed",
        layout=None,
        call="attention",
        batch=2,
        view=lambda x: {n: transposed(v, 1, 2) for n, v in x.items()},
    )
    yield of.case("layout_not_said", layout=None, seq_q=5, seq_k=7)
    yield of.case("layout_not_said_many_heads", layout=None, heads=(8, 8), seq_q=2, seq_k=2)


def _standard_decode() -> Iterator[Case]:
    of = Dense("attention.standard.decode", 2, 2)
    yield from of.dtypes()
    yield from of.edges()
    yield from of.bounds()
    yield from of.masks()
    yield from _aliases(of)


def _gqa_prefill() -> Iterator[Case]:
    of = Dense("attention.gqa.prefill", 4, 2, seq_q=2, seq_k=4)
    yield from of.dtypes()
    yield from Dense(of.op, 2, 1, seq_q=2, seq_k=4).edges()
    yield from Dense(of.op, 2, 1, seq_q=2, seq_k=4).bounds()
    yield of.case("alibi_four_heads", slopes=tensor("float32", [0.5, 0.25, 0.125, 0.0625]))
    yield of.case("window_four_heads", window_left=1, softcap=1.5, layout="BHSD")
    yield of.case("multi_query", heads=(4, 1))
    yield of.case("multi_query_bhsd", "bfloat16", heads=(3, 1), layout="BHSD")
    yield of.case("ratio_3", heads=(6, 2), seq_q=2, seq_k=3)
    yield of.case("mask_per_query_head", mask=Draw(of.op, "mask").bools(1, 4, 2, 4), causal=False)
    yield of.case(
        "mask_float_minus_infinity",
        causal=False,
        mask=tensor("float32", np.where(Draw(of.op, "cut").bools(1, 4, 2, 4).values, 0.5, -INF)),
    )
    yield from _aliases(of)
    yield of.case("layout_not_said", layout=None, call="attention", seq_q=5, seq_k=5)
    yield of.case("layout_not_said_many_heads", layout=None, heads=(8, 4), call="attention", seq_q=4, seq_k=4)


def _gqa_decode() -> Iterator[Case]:
    of = Dense("attention.gqa.decode", 4, 2)
    yield from of.dtypes()
    yield from Dense(of.op, 2, 1).edges()
    yield from Dense(of.op, 2, 1).bounds()
    yield of.case("alibi_four_heads", slopes=tensor("float32", [0.5, 0.25, 0.125, 0.0625]))
    yield of.case("multi_query", heads=(4, 1))
    yield of.case("ratio_3_bhsd", heads=(6, 2), layout="BHSD")
    yield of.case("mask_per_query_head", mask=Draw(of.op, "mask").bools(1, 4, 1, 4), causal=False)
    yield from _aliases(of)


def _cross(op: str, seq_q: int) -> Iterator[Case]:
    of = Dense(op, 2, 2, seq_q=seq_q, seq_k=4)
    yield from of.dtypes()
    yield from of.edges()
    yield from of.masks()
    yield of.case("shared_heads", heads=(4, 2), seq_k=5)
    yield of.case("multi_query_bhsd", "bfloat16", heads=(4, 1), layout="BHSD")
    yield of.case("alias_cross", call="attention.cross", seq_k=5, mask=tensor("bool", [[1, 0, 1, 1, 0]]))


CASES = {
    "attention.standard.prefill": _standard_prefill,
    "attention.standard.decode": _standard_decode,
    "attention.gqa.prefill": _gqa_prefill,
    "attention.gqa.decode": _gqa_decode,
    "attention.cross.prefill": lambda: _cross("attention.cross.prefill", 2),
    "attention.cross.decode": lambda: _cross("attention.cross.decode", 1),
}


def check() -> None:
    draw = Draw("attention", "check")
    q, k, v = (draw.floats("float64", 2, s, h, 4).values for s, h in ((3, 4), (5, 2), (5, 2)))
    # Vectorised, with repeated heads and a lower triangle.
    scores = np.einsum("bshd,bthd->bhst", q, k.repeat(2, 2)) / 2
    lower = np.tril(np.ones((3, 5)), k=2)
    weights = np.exp(np.where(lower, scores, -INF))
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("bhst,bthd->bshd", weights, v.repeat(2, 2))
    assert np.allclose(dense(q, k, v, causal=True), want, rtol=1e-13)
    # Causal, a boolean mask, a mask of minus infinities and a window say the same.
    for also in (
        dense(q, k, v, tensor("bool", lower), causal=False),
        dense(q, k, v, tensor("float64", np.where(lower, 0.0, -INF)), causal=False),
        dense(q, k, v, causal=False, window_right=0),
        dense(q, k, v, causal=True, softcap=1e9),
    ):
        assert np.allclose(also, want, rtol=1e-12)
    # Slopes are a mask of distances.
    slopes = np.array([0.5, 0.25, 0.125, 1.0])
    distances = -slopes[:, None, None] * np.abs(np.arange(3)[:, None] + 2 - np.arange(5)[None, :])
    assert np.allclose(
        dense(q, k, v, slopes=slopes, causal=False),
        dense(q, k, v, tensor("float64", distances[None]), causal=False),
        rtol=1e-13,
    )
