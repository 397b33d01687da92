"""Attention within packed sequences."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .attention import attend, dense, reachable
from .case import (
    INF,
    NAN,
    Case,
    Draw,
    Expected,
    Tensor,
    bad_data,
    every_other,
    padded_rows,
    tensor,
    transposed,
    with_value,
)
from .number import FLOATS


def varlen(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    starts: np.ndarray,
    firsts: np.ndarray,
    *,
    causal: bool = True,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Sequence b owns the rows from starts[b] to starts[b + 1] and the keys from firsts[b] to firsts[b + 1]."""
    out = np.zeros((*q.shape[:2], v.shape[2]))
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    for b in range(len(starts) - 1):
        rows, keys = slice(starts[b], starts[b + 1]), slice(firsts[b], firsts[b + 1])
        allowed = reachable(
            int(starts[b + 1] - starts[b]), int(firsts[b + 1] - firsts[b]), causal, window_left, window_right
        )
        for h in range(q.shape[1]):
            kv = h // (q.shape[1] // k.shape[1])
            sink = -INF if sinks is None else float(sinks[h])
            out[rows, h] = attend(
                q[rows, h], k[keys, kv], v[keys, kv], allowed, softcap=softcap, scale=scale, sink=sink
            )
    return out


class Varlen:
    """Writes the cases of one operation."""

    def __init__(self, op: str, heads: int, kv_heads: int) -> None:
        self.op, self.heads, self.kv_heads = op, heads, kv_heads

    def case(
        self,
        name: str,
        dtype: str = "float32",
        *,
        queries: tuple[int, ...] = (2, 1),
        lengths: tuple[int, ...] = (5, 2),
        lead: tuple[int, int] = (0, 0),
        rest: tuple[int, int] = (0, 0),
        dims: tuple[int, int] = (4, 4),
        heads: tuple[int, int] | None = None,
        call: str | None = None,
        index: str = "int32",
        full_precision: bool = False,
        sinks: Tensor | None = None,
        edit: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
        view: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
        error: bool = False,
        **params: Any,
    ) -> Case:
        h, kv = heads or (self.heads, self.kv_heads)
        draw = Draw(self.op, name)
        fill = draw.floats if full_precision else draw.coarse
        starts, firsts = (np.cumsum([of, *counts]) for of, counts in zip(lead, (queries, lengths), strict=True))
        inputs = {
            "query": fill(dtype, int(starts[-1]) + rest[0], h, dims[0]),
            "key": fill(dtype, int(firsts[-1]) + rest[1], kv, dims[0]),
            "value": fill(dtype, int(firsts[-1]) + rest[1], kv, dims[1]),
            "cu_seqlens_q": tensor(index, starts),
            "cu_seqlens_k": tensor(index, firsts),
        }
        inputs = edit(inputs) if edit else inputs
        if error:
            return bad_data(name, self.op, inputs, params, None)
        x = {n: t.values for n, t in inputs.items()}
        promises = ("max_seqlen_q", "max_seqlen_k")
        said = {n: v for n, v in params.items() if n not in promises}
        out = varlen(*x.values(), sinks=None if sinks is None else sinks.values, **said)
        inputs = view(inputs) if view else inputs
        if sinks is not None:
            inputs["sinks"] = sinks
        return Case(name, call or self.op, inputs, {"output": Expected(dtype, out)}, params, None)

    def all(self) -> Iterator[Case]:
        for dtype in FLOATS:
            yield self.case(dtype, dtype, full_precision=True)
            yield self.case(f"{dtype}_full", dtype, causal=False, index="int64")
        yield self.case(
            "query_gaps_key_transposed_value_padded",
            view=lambda x: (
                x
                | {
                    "query": every_other(x["query"]),
                    "key": transposed(x["key"], 0, 1),
                    "value": padded_rows(x["value"]),
                    "cu_seqlens_k": every_other(x["cu_seqlens_k"]),
                }
            ),
        )
        small = Varlen(self.op, 2, 1) if self.heads != self.kv_heads else Varlen(self.op, 1, 1)
        yield from small.edges()
        if self.heads != self.kv_heads:
            yield self.case("four_heads_window", window_left=1, softcap=1.5)
            yield self.case("multi_query", heads=(4, 1))
            yield self.case("ratio_3", heads=(6, 2))

    def edges(self) -> Iterator[Case]:
        yield self.case("as_many_keys_as_queries", queries=(3, 4), lengths=(3, 4))
        yield self.case("three_sequences", queries=(2, 1, 3), lengths=(3, 1, 3))
        yield self.case("a_sequence_without_queries", queries=(2, 0, 1), lengths=(4, 2, 3))
        yield self.case("a_sequence_without_keys", queries=(2, 2, 1), lengths=(4, 0, 3))
        yield self.case("more_queries_than_keys", queries=(4, 1), lengths=(2, 3))
        yield self.case("more_queries_than_keys_full", queries=(4, 1), lengths=(2, 0), causal=False)
        yield self.case("more_queries_than_keys_window", queries=(4, 1), lengths=(2, 3), causal=False, window_left=1)
        yield self.case("one_query_each", queries=(1, 1, 1), lengths=(5, 1, 3))
        yield self.case("no_queries", queries=(0, 0), lengths=(4, 2))
        yield self.case("no_keys", queries=(2, 1), lengths=(0, 0))
        yield self.case("no_sequences", queries=(), lengths=(), rest=(3, 2))
        yield self.case("rows_of_no_sequence", lead=(1, 2), rest=(2, 1))
        yield self.case("rows_of_no_sequence_full", lead=(2, 0), rest=(0, 3), causal=False)
        yield self.case("one_long_sequence", "bfloat16", queries=(17,), lengths=(19,))
        yield self.case("other_value_width", dims=(4, 6))
        yield self.case("scale", scale=0.3)
        yield self.case("negative_scale", scale=-0.3)
        yield self.case("softcap", softcap=0.75)
        yield self.case("window_left_1", window_left=1)
        yield self.case("window_left_0", window_left=0, causal=False)
        yield self.case("window_both", window_left=1, window_right=1, causal=False)
        yield self.case("window_right_0", window_right=0, causal=False)
        yield self.case("window_wider_than_sequences", window_left=50)
        yield self.case("everything", "float64", scale=0.9, softcap=1.5, window_left=2, max_seqlen_q=2)
        yield self.case("longest_promised", max_seqlen_q=2, max_seqlen_k=5)
        yield self.case("longer_promised", max_seqlen_q=9, max_seqlen_k=70, index="int64")
        sinks = tensor("float32", [0.5 - 0.75 * i for i in range(self.heads)])
        yield self.case("sinks", sinks=sinks)
        yield self.case("sinks_long", "bfloat16", queries=(3, 17), lengths=(4, 19), sinks=sinks, causal=False)
        yield self.case("sinks_no_keys", queries=(2, 2, 1), lengths=(4, 0, 3), rest=(1, 0), sinks=sinks, softcap=2.0)
        yield self.case("alias_varlen", call="attention.varlen")
        yield self.case(
            "nan_outside_the_sequences",
            lead=(0, 1),
            rest=(0, 1),
            edit=lambda x: {
                n: with_value(with_value(t, (0, 0, 0), NAN), (t.values.shape[0] - 1, 0, 0), NAN)
                if n in ("key", "value")
                else t
                for n, t in x.items()
            },
        )
        yield self.case(
            "nan_in_one_sequence", edit=lambda x: x | {"value": with_value(x["value"], (6, 0, 1), NAN)}, causal=False
        )
        yield self.case(
            "error_rows_beyond_the_queries", edit=lambda x: x | {"cu_seqlens_q": tensor("int32", [0, 2, 4])}, error=True
        )
        yield self.case(
            "error_keys_beyond_the_keys", edit=lambda x: x | {"cu_seqlens_k": tensor("int32", [0, 5, 8])}, error=True
        )
        yield self.case(
            "error_rows_go_backwards", edit=lambda x: x | {"cu_seqlens_q": tensor("int32", [0, 3, 2])}, error=True
        )
        yield self.case(
            "error_keys_go_backwards", edit=lambda x: x | {"cu_seqlens_k": tensor("int32", [6, 5, 7])}, error=True
        )
        yield self.case("error_longer_than_promised", max_seqlen_q=1, error=True)
        yield self.case("error_more_keys_than_promised", max_seqlen_k=4, error=True)


CASES = {
    "attention.standard.prefill.varlen": Varlen("attention.standard.prefill.varlen", 2, 2).all,
    "attention.gqa.prefill.varlen": Varlen("attention.gqa.prefill.varlen", 4, 2).all,
}


def check() -> None:
    """One sequence is dense attention."""
    draw = Draw("varlen", "check")
    q, k, v = (draw.floats("float64", *s).values for s in ((3, 4, 4), (5, 2, 4), (5, 2, 6)))
    for causal in (False, True):
        got = varlen(q, k, v, np.array([0, 3]), np.array([0, 5]), causal=causal)
        assert np.allclose(got, dense(q[None], k[None], v[None], causal=causal)[0], rtol=1e-14)
