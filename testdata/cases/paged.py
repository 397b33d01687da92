"""Attention over a paged cache."""

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
from .number import FLOATS_AND_FP8


def gathered(cache: np.ndarray, table: np.ndarray, length: int) -> np.ndarray:
    """The first `length` slots of the pages a table names; the cache is [page, slot, ...]."""
    size = cache.shape[1]
    return np.array([cache[table[t // size], t % size] for t in range(length)]).reshape(length, *cache.shape[2:])


def paged(
    q: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    tables: np.ndarray,
    lengths: np.ndarray,
    starts: np.ndarray,
    *,
    causal: bool,
    scale: float | None = None,
    window_left: int = -1,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Packed queries [rows, heads, d], caches as NHD; sequence b owns the rows from starts[b] to starts[b + 1]."""
    out = np.zeros(q.shape)
    heads, dim = q.shape[1:]
    for b, length in enumerate(lengths):
        rows = slice(starts[b], starts[b + 1])
        k, v = (gathered(cache, tables[b], int(length)) for cache in (key_cache, value_cache))
        allowed = reachable(int(starts[b + 1] - starts[b]), int(length), causal, window_left, -1)
        for h in range(heads):
            kv = h // (heads // key_cache.shape[2])
            out[rows, h] = attend(
                q[rows, h],
                k[:, kv],
                v[:, kv],
                allowed,
                softcap=softcap,
                scale=1 / math.sqrt(dim) if scale is None else scale,
                sink=-INF if sinks is None else float(sinks[h]),
            )
    return out


def tables_for(draw: Draw, dtype: str, lengths: list[int], size: int, pages: int, width: int, garbage: int) -> Tensor:
    """Distinct pages for every sequence, `garbage` in the entries its context does not reach."""
    free = draw.permutation(pages)
    used = [-(-n // size) for n in lengths]
    return tensor(dtype, [[free.pop() if i < n else garbage for i in range(width)] for n in used])


class Paged:
    """Writes the cases of one paged operation."""

    def __init__(self, op: str, heads: int, kv_heads: int) -> None:
        self.op, self.heads, self.kv_heads = op, heads, kv_heads
        self.decode = ".decode." in op

    def case(
        self,
        name: str,
        dtype: str = "float32",
        cache: str | None = None,
        *,
        lengths: list[int] | None = None,
        queries: list[int] | None = None,
        size: int = 2,
        dim: int = 4,
        heads: tuple[int, int] | None = None,
        layout: str | None = None,
        call: str | None = None,
        index: str = "int32",
        rank_4: bool = False,
        garbage: int = 0,
        full_precision: bool = False,
        pages: int = 4,
        width: int = 3,
        sinks: Tensor | None = None,
        edit: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
        view: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
        error: bool = False,
        **params: Any,
    ) -> Case:
        lengths = [5, 2] if lengths is None else lengths
        queries = [1] * len(lengths) if self.decode else ([2, 1] if queries is None else queries)
        h, kv = heads or (self.heads, self.kv_heads)
        draw = Draw(self.op, name)
        fill = draw.floats if full_precision else draw.coarse
        inputs = {
            "query": fill(dtype, sum(queries), h, dim),
            "key_cache": fill(cache or dtype, pages, size, kv, dim),
            "value_cache": fill(cache or dtype, pages, size, kv, dim),
            "block_tables": tables_for(draw, index, lengths, size, pages, width, garbage),
            "context_lens": tensor(index, np.array(lengths, dtype=np.int64)),
        }
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int64)
        if not self.decode:
            inputs["cu_seqlens_q"] = tensor(index, starts)
        inputs = edit(inputs) if edit else inputs
        if error:
            return bad_data(name, self.op, inputs, params, layout)
        x = {n: t.values for n, t in inputs.items()}
        out = paged(
            x["query"],
            x["key_cache"],
            x["value_cache"],
            x["block_tables"],
            x["context_lens"],
            starts,
            sinks=None if sinks is None else sinks.values,
            **({"causal": not self.decode} | {n: v for n, v in params.items() if n != "shared_prefix"}),
        )
        if rank_4:
            inputs["query"] = tensor(dtype, inputs["query"].values[:, None])
            out = out[:, None]
        if layout == "HND":
            for n in ("key_cache", "value_cache"):
                inputs[n] = tensor(inputs[n].dtype, inputs[n].values.swapaxes(1, 2))
        inputs = view(inputs) if view else inputs
        if sinks is not None:
            inputs["sinks"] = sinks
        return Case(name, call or self.op, inputs, {"output": Expected(dtype, out)}, params, layout)

    def layouts(self) -> Iterator[Case]:
        for dtype in FLOATS_AND_FP8:
            yield self.case(f"{dtype}_nhd", dtype, lengths=[3, 2], queries=[2, 1], pages=3, full_precision=True)
            yield self.case(f"{dtype}_hnd", dtype, lengths=[3, 1], queries=[2, 1], pages=3, layout="HND", index="int64")
        yield self.case(
            "query_gaps_key_transposed_value_padded",
            view=lambda x: (
                x
                | {
                    "query": every_other(x["query"]),
                    "key_cache": transposed(x["key_cache"], 1, 2),
                    "value_cache": padded_rows(x["value_cache"]),
                    "block_tables": transposed(x["block_tables"], 0, 1),
                }
            ),
        )

    def edges(self) -> Iterator[Case]:
        yield self.case("bfloat16_query_e4m3_cache", "bfloat16", "float8_e4m3fn")
        yield self.case("float16_query_e5m2_cache_hnd", "float16", "float8_e5m2", layout="HND")
        yield self.case("float32_query_bfloat16_cache", "float32", "bfloat16")
        yield self.case("bfloat16_query_float32_cache", "bfloat16", "float32")
        yield self.case("nhd_said", layout="NHD")
        yield self.case("no_context", lengths=[0, 3])
        yield self.case("full_pages", lengths=[4, 6], pages=5)
        yield self.case("one_slot_per_page", lengths=[3, 1], size=1)
        yield self.case("one_large_page", lengths=[5, 3], size=6, pages=2, width=1, layout="HND")
        yield self.case("unused_tables_hold_garbage", garbage=-1)
        yield self.case("unused_tables_hold_garbage_beyond", garbage=1 << 30, index="int64", lengths=[1, 0])
        yield self.case("scale", scale=0.3)
        yield self.case("softcap", softcap=0.75)
        yield self.case("window_left_1", window_left=1)
        yield self.case("window_left_0_hnd", window_left=0, layout="HND")
        yield self.case("window_wider_than_context", window_left=50)
        yield self.case("everything", "float64", scale=0.9, softcap=1.5, window_left=2)
        yield self.case("shared_page", edit=lambda x: x | {"block_tables": tensor("int32", [[3, 1, 0], [3, 0, 0]])})
        both = tensor("int32", [[3, 1, 0], [3, 1, 2]])
        for shared in (2, 3, 4):
            yield self.case(
                f"shared_prefix_{shared}",
                lengths=[5, 4],
                pages=5,
                edit=lambda x: x | {"block_tables": both},
                shared_prefix=shared,
            )
        yield self.case(
            "nan_beyond_the_context",
            edit=lambda x: {
                n: with_value(t, (int(x["block_tables"].values[0, 2]), 1, 0, 0), NAN) if "cache" in n else t
                for n, t in x.items()
            },
        )
        yield self.case(
            "nan_in_the_context",
            edit=lambda x: (
                x | {"value_cache": with_value(x["value_cache"], (int(x["block_tables"].values[1, 0]), 0, 0, 1), NAN)}
            ),
        )
        yield self.case(
            "no_sequences",
            lengths=[],
            queries=[],
            edit=lambda x: x | {"block_tables": tensor("int32", np.zeros((0, 3), dtype=np.int64))},
        )
        sinks = tensor("float32", [0.5 - 0.75 * i for i in range(self.heads)])
        yield self.case("sinks", sinks=sinks)
        yield self.case("sinks_long", "bfloat16", lengths=[17, 3], size=4, pages=7, width=5, sinks=sinks, layout="HND")
        yield self.case("sinks_no_context", lengths=[0, 3], sinks=sinks, softcap=0.75)
        yield self.case("alias_paged", call="attention.paged", lengths=[3, 4])
        yield self.case(
            "error_page_beyond_the_cache",
            edit=lambda x: x | {"block_tables": with_value(x["block_tables"], (0, 1), 4)},
            error=True,
        )
        yield self.case(
            "error_negative_page",
            edit=lambda x: x | {"block_tables": with_value(x["block_tables"], (1, 0), -1)},
            error=True,
        )
        yield self.case(
            "error_context_longer_than_the_table",
            edit=lambda x: x | {"context_lens": tensor("int32", [7, 2])},
            error=True,
        )
        yield self.case(
            "error_negative_context", edit=lambda x: x | {"context_lens": tensor("int32", [5, -1])}, error=True
        )

    def prefill(self) -> Iterator[Case]:
        yield self.case("full", causal=False)
        yield self.case("full_window", causal=False, window_left=1)
        yield self.case("three_sequences", lengths=[3, 1, 3], queries=[2, 1, 3], pages=5)
        yield self.case("a_sequence_without_queries", lengths=[4, 2, 3], queries=[2, 0, 1], pages=5)
        yield self.case("more_queries_than_context", lengths=[2, 3], queries=[4, 1])
        yield self.case("more_queries_than_context_full", lengths=[2, 0], queries=[4, 1], causal=False)
        yield self.case("one_long_sequence", "bfloat16", lengths=[7], queries=[7], size=3)
        yield self.case("no_queries", lengths=[4, 2], queries=[0, 0])
        yield self.case(
            "error_rows_beyond_the_queries", edit=lambda x: x | {"cu_seqlens_q": tensor("int32", [0, 2, 4])}, error=True
        )
        yield self.case(
            "error_rows_go_backwards", edit=lambda x: x | {"cu_seqlens_q": tensor("int32", [0, 4, 3])}, error=True
        )

    def all(self) -> Iterator[Case]:
        yield from self.layouts()
        shared = self.heads != self.kv_heads
        small = Paged(self.op, 2, 1) if shared else Paged(self.op, 1, 1)
        yield from small.edges()
        if self.decode:
            yield self.case("query_rank_4", rank_4=True)
            yield self.case("query_rank_4_hnd_bfloat16", "bfloat16", rank_4=True, layout="HND")
        else:
            yield from small.prefill()
        if shared:
            yield self.case("four_heads_window", window_left=1, softcap=1.5)
            yield self.case("multi_query", heads=(4, 1))
            yield self.case("ratio_3", heads=(6, 2), layout="HND")


CASES = {
    "attention.standard.prefill.paged": Paged("attention.standard.prefill.paged", 2, 2).all,
    "attention.standard.decode.paged": Paged("attention.standard.decode.paged", 2, 2).all,
    "attention.gqa.prefill.paged": Paged("attention.gqa.prefill.paged", 4, 2).all,
    "attention.gqa.decode.paged": Paged("attention.gqa.decode.paged", 4, 2).all,
}


def check() -> None:
    """Pages in order are a contiguous cache."""
    draw = Draw("paged", "check")
    q, k, v = (draw.floats("float64", *s).values for s in ((3, 4, 4), (3, 2, 2, 4), (3, 2, 2, 4)))
    for causal in (False, True):
        got = paged(q, k, v, np.array([[0, 1, 2]]), np.array([5]), np.array([0, 3]), causal=causal)
        flat_k, flat_v = (x.reshape(1, 6, 2, 4)[:, :5] for x in (k, v))
        assert np.allclose(got, dense(q[None], flat_k, flat_v, causal=causal)[0], rtol=1e-14)
