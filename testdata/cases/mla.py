"""Multi-head latent attention."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .attention import attend, dense, reachable
from .case import NAN, Case, Draw, Expected, Tensor, bad_data, every_other, padded_rows, tensor, transposed, with_value
from .number import FLOATS, FLOATS_AND_FP8
from .paged import gathered, tables_for


def latent(
    q_nope: np.ndarray, q_pe: np.ndarray, ckv: np.ndarray, kpe: np.ndarray, *, scale: float, causal: bool
) -> np.ndarray:
    """One sequence: queries [s, heads, d], keys [t, d]."""
    out = np.zeros(q_nope.shape)
    keys = np.concatenate([ckv, kpe], axis=1)
    allowed = reachable(q_nope.shape[0], ckv.shape[0], causal, -1, -1)
    for h in range(q_nope.shape[1]):
        out[:, h] = attend(np.concatenate([q_nope[:, h], q_pe[:, h]], axis=1), keys, ckv, allowed, scale=scale)
    return out


HEADS, CKV, KPE = 2, 6, 4


def _contiguous(
    op: str,
    name: str,
    dtype: str = "float32",
    cache: str | None = None,
    *,
    queries: list[int],
    keys: list[int],
    indptr: str | None = None,
    rank_3: bool = False,
    causal: bool | None = None,
    scale: float = 0.25,
    call: str | None = None,
    full_precision: bool = False,
    edit: Any = None,
    view: Any = None,
    heads: int = HEADS,
) -> Case:
    draw = Draw(op, name)
    fill = draw.floats if full_precision else draw.coarse
    s, t = sum(queries), sum(keys)
    inputs: dict[str, Tensor] = {
        "q_nope": fill(dtype, s, heads, CKV),
        "q_pe": fill(dtype, s, heads, KPE),
        "ckv": fill(cache or dtype, t, CKV),
        "kpe": fill(cache or dtype, t, KPE),
    }
    inputs = edit(inputs) if edit else inputs
    x = {n: v.values for n, v in inputs.items()}
    out = np.zeros(x["q_nope"].shape)
    q_at, k_at = (np.concatenate([[0], np.cumsum(n)]).astype(np.int64) for n in (queries, keys))
    for b in range(len(queries)):
        rows, cols = slice(q_at[b], q_at[b + 1]), slice(k_at[b], k_at[b + 1])
        out[rows] = latent(
            x["q_nope"][rows], x["q_pe"][rows], x["ckv"][cols], x["kpe"][cols], scale=scale, causal=causal is not False
        )
    if rank_3:
        inputs |= {n: tensor(inputs[n].dtype, inputs[n].values[:, None]) for n in ("ckv", "kpe")}
    inputs = view(inputs) if view else inputs
    if indptr:
        inputs |= {"qo_indptr": tensor(indptr, q_at), "kv_indptr": tensor(indptr, k_at)}
    params: dict[str, Any] = {"scale": scale} | ({} if causal is None else {"causal": causal})
    return Case(name, call or op, inputs, {"output": Expected(dtype, out)}, params)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "q_nope": lambda t: transposed(t, 0, 1),
    "q_pe": every_other,
    "ckv": padded_rows,
    "kpe": lambda t: transposed(t, 0, 1),
}


def _view(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: VIEWS[n](t) for n, t in inputs.items()}


def _edges(op: str, queries: list[int], keys: list[int]) -> Iterator[Case]:
    def of(name: str, *args: Any, **kwargs: Any) -> Case:
        return _contiguous(op, name, *args, **({"queries": queries, "keys": keys} | kwargs))

    for dtype in FLOATS:
        yield of(f"{dtype}", dtype, full_precision=True)
        yield of(f"{dtype}_full_rank_3", dtype, causal=False, rank_3=True)
    for cache in FLOATS_AND_FP8[4:]:
        for dtype in ("float32", "bfloat16"):
            yield of(f"{dtype}_query_{cache}_cache", dtype, cache, rank_3=dtype == "float32")
    yield of("float16_query_float32_cache", "float16", "float32")
    yield of("scale", scale=1.5)
    yield of("four_heads", heads=4)
    yield of("one_head", heads=1)
    yield of("strided", view=_view)
    yield of("no_keys", keys=[0])
    yield of("no_keys_full", keys=[0], causal=False)
    yield of("nan_in_kpe", "bfloat16", edit=lambda x: x | {"kpe": with_value(x["kpe"], (1, 0), NAN)})
    yield of("nan_in_ckv", edit=lambda x: x | {"ckv": with_value(x["ckv"], (keys[0] - 1, 3), NAN)})
    yield of("alias_mla", call="attention.mla")


def _prefill() -> Iterator[Case]:
    op = "attention.mla.prefill"
    yield from _edges(op, [3], [4])
    yield _contiguous(op, "causal_square", queries=[4], keys=[4], causal=True)
    yield _contiguous(op, "causal_more_queries", queries=[4], keys=[2])
    yield _contiguous(op, "full_more_queries", queries=[4], keys=[2], causal=False)
    yield _contiguous(op, "no_queries", queries=[0], keys=[3])
    yield _contiguous(op, "two_sequences", queries=[2, 3], keys=[4, 3], indptr="int32")
    yield _contiguous(op, "two_sequences_full", "bfloat16", queries=[2, 3], keys=[4, 3], indptr="int64", causal=False)
    yield _contiguous(op, "two_sequences_more_queries", queries=[3, 1], keys=[2, 3], indptr="int32", rank_3=True)
    yield _contiguous(
        op, "three_sequences_one_without_queries_one_without_keys", queries=[2, 0, 1], keys=[3, 2, 0], indptr="int64"
    )
    yield _contiguous(op, "one_sequence_said", queries=[2], keys=[3], indptr="int32", causal=False)
    good = _contiguous(op, "error", queries=[2, 2], keys=[3, 2], indptr="int32")
    yield bad_data(
        "error_queries_beyond_the_end", op, good.inputs | {"qo_indptr": tensor("int32", [0, 2, 5])}, good.params
    )
    yield bad_data("error_keys_go_backwards", op, good.inputs | {"kv_indptr": tensor("int32", [0, 6, 5])}, good.params)


def _decode() -> Iterator[Case]:
    op = "attention.mla.decode"
    yield from _edges(op, [1], [4])
    yield _contiguous(op, "one_sequence_said", queries=[1], keys=[3], indptr="int32")
    yield _contiguous(op, "second_sequence_owns_the_query", queries=[0, 1], keys=[2, 3], indptr="int64")


def _paged(
    name: str,
    dtype: str = "float32",
    cache: str | None = None,
    *,
    lengths: list[int] | None = None,
    size: int = 2,
    index: str = "int32",
    garbage: int = 0,
    scale: float = 0.25,
    call: str | None = None,
    full_precision: bool = False,
    heads: int = HEADS,
    edit: Any = None,
    view: Any = None,
    error: bool = False,
    queries: list[int] | None = None,
    rest: int = 0,
    causal: bool = True,
) -> Case:
    """One query per sequence, or so many."""
    op = "attention.mla.decode.paged" if queries is None else "attention.mla.prefill.paged"
    draw = Draw(op, name)
    fill = draw.floats if full_precision else draw.coarse
    lengths = [5, 2] if lengths is None else lengths
    counts = [1] * len(lengths) if queries is None else queries
    inputs = {
        "q_nope": fill(dtype, sum(counts) + rest, heads, CKV),
        "q_pe": fill(dtype, sum(counts) + rest, heads, KPE),
        "ckv_cache": fill(cache or dtype, 5, size, CKV),
        "kpe_cache": fill(cache or dtype, 5, size, KPE),
        "block_tables": tables_for(draw, index, lengths, size, 5, 3, garbage),
        "context_lens": tensor(index, np.array(lengths, dtype=np.int64)),
    }
    starts = np.cumsum([0, *counts])
    params: dict[str, Any] = {"scale": scale}
    if queries is not None:
        inputs["qo_indptr"] = tensor(index, starts)
        params["causal"] = causal
    inputs = edit(inputs) if edit else inputs
    if error:
        return bad_data(name, op, inputs, params)
    x = {n: t.values for n, t in inputs.items()}
    out = np.zeros(x["q_nope"].shape)
    for b, n in enumerate(lengths):
        ckv, kpe = (gathered(x[c], x["block_tables"][b], n) for c in ("ckv_cache", "kpe_cache"))
        rows = slice(starts[b], starts[b + 1])
        bound = causal and queries is not None
        out[rows] = latent(x["q_nope"][rows], x["q_pe"][rows], ckv, kpe, scale=scale, causal=bound)
    inputs = view(inputs) if view else inputs
    return Case(name, call or op, inputs, {"output": Expected(dtype, out)}, params)


def _prefill_paged() -> Iterator[Case]:
    for dtype in FLOATS:
        yield _paged(dtype, dtype, full_precision=True, queries=[2, 1])
        yield _paged(f"{dtype}_full", dtype, index="int64", lengths=[4, 1], queries=[1, 3], causal=False)
    for cache in FLOATS_AND_FP8[4:]:
        yield _paged(f"float16_query_{cache}_cache", "float16", cache, queries=[3, 2])
    yield _paged("four_heads", heads=4, queries=[2, 2])
    yield _paged("no_context", lengths=[0, 3], queries=[2, 2])
    yield _paged("a_sequence_without_queries", queries=[0, 2])
    yield _paged("more_queries_than_context", lengths=[2, 3], queries=[4, 1])
    yield _paged("rows_of_no_sequence", queries=[2, 1], rest=2)
    yield _paged("unused_tables_hold_garbage", garbage=-1, queries=[2, 2])
    yield _paged(
        "no_sequences",
        lengths=[],
        queries=[],
        rest=1,
        edit=lambda x: x | {"block_tables": tensor("int32", np.zeros((0, 3), dtype=np.int64))},
    )
    yield _paged("alias_mla", call="attention.mla", queries=[2, 1])
    yield _paged(
        "error_page_beyond_the_cache",
        error=True,
        queries=[2, 1],
        edit=lambda x: x | {"block_tables": with_value(x["block_tables"], (0, 2), 5)},
    )
    yield _paged(
        "error_rows_beyond_the_queries",
        error=True,
        queries=[2, 1],
        edit=lambda x: x | {"qo_indptr": tensor("int32", [0, 2, 4])},
    )
    yield _paged(
        "error_rows_go_backwards",
        error=True,
        queries=[2, 1],
        edit=lambda x: x | {"qo_indptr": tensor("int32", [0, 3, 2])},
    )


def _decode_paged() -> Iterator[Case]:
    for dtype in FLOATS:
        yield _paged(dtype, dtype, full_precision=True)
        yield _paged(f"{dtype}_int64", dtype, index="int64", lengths=[4, 1])
    for cache in FLOATS_AND_FP8[4:]:
        for dtype in ("float32", "bfloat16", "float16"):
            yield _paged(f"{dtype}_query_{cache}_cache", dtype, cache)
    yield _paged("scale", scale=1.5)
    yield _paged("four_heads", heads=4)
    yield _paged("no_context", lengths=[0, 3])
    yield _paged("full_pages", lengths=[6, 4])
    yield _paged("three_slots_per_page", lengths=[7, 3], size=3)
    yield _paged("unused_tables_hold_garbage", garbage=-1)
    yield _paged("unused_tables_hold_garbage_beyond", garbage=1 << 30, index="int64")
    yield _paged(
        "no_sequences",
        lengths=[],
        edit=lambda x: x | {"block_tables": tensor("int32", np.zeros((0, 3), dtype=np.int64))},
    )
    yield _paged(
        "nan_beyond_the_context",
        edit=lambda x: x | {"ckv_cache": with_value(x["ckv_cache"], (int(x["block_tables"].values[0, 2]), 1, 0), NAN)},
    )
    yield _paged(
        "nan_in_the_context",
        edit=lambda x: x | {"ckv_cache": with_value(x["ckv_cache"], (int(x["block_tables"].values[1, 0]), 0, 0), NAN)},
    )
    yield _paged(
        "strided",
        view=lambda x: (
            x
            | {
                "q_nope": transposed(x["q_nope"], 0, 1),
                "q_pe": every_other(x["q_pe"]),
                "ckv_cache": padded_rows(x["ckv_cache"]),
                "kpe_cache": transposed(x["kpe_cache"], 0, 1),
            }
        ),
    )
    yield _paged("alias_mla", call="attention.mla")
    yield _paged(
        "error_page_beyond_the_cache",
        error=True,
        edit=lambda x: x | {"block_tables": with_value(x["block_tables"], (0, 2), 5)},
    )
    yield _paged(
        "error_negative_page",
        error=True,
        edit=lambda x: x | {"block_tables": with_value(x["block_tables"], (0, 0), -2)},
    )
    yield _paged(
        "error_context_longer_than_the_table", error=True, edit=lambda x: x | {"context_lens": tensor("int32", [7, 2])}
    )


CASES = {
    "attention.mla.prefill": _prefill,
    "attention.mla.decode": _decode,
    "attention.mla.decode.paged": _decode_paged,
    "attention.mla.prefill.paged": _prefill_paged,
}


def check() -> None:
    """Latent attention is multi-query attention with keys of two parts."""
    draw = Draw("mla", "check")
    q_nope, q_pe, ckv, kpe = (draw.floats("float64", *s).values for s in ((3, 2, 8), (3, 2, 4), (5, 8), (5, 4)))
    want = dense(
        np.concatenate([q_nope, q_pe], 2)[None],
        np.concatenate([ckv, kpe], 1)[None, :, None],
        ckv[None, :, None],
        causal=True,
        scale=0.3,
    )[0]
    assert np.allclose(latent(q_nope, q_pe, ckv, kpe, scale=0.3, causal=True), want, rtol=1e-14)
