"""Upkeep of a paged cache. Both caches are given in full after the call, in logical order."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from .case import NAN, Case, Draw, Expected, Tensor, bad_data, every_other, padded_rows, tensor, transposed, with_value
from .number import FLOATS, FLOATS_AND_FP8, rounded, rounded_array

APPEND, COMPACT = "kv_cache.append", "kv_cache.compact"
PAGES, SIZE, HEADS, DIM = 3, 2, 2, 2
CACHES = ("key_cache", "value_cache")


def appended(cache: np.ndarray, new: np.ndarray, slots: list[int], dtype: str) -> np.ndarray:
    """The cache is [page, slot, head, d]."""
    after = cache.copy()
    for token, slot in zip(new, slots, strict=True):
        if slot >= 0:
            after[slot // cache.shape[1], slot % cache.shape[1]] = rounded_array(dtype, token)
    return after


def moved(cache: np.ndarray, moves: list[list[int]]) -> np.ndarray:
    after = cache.copy()
    for source, target in moves:
        after[target] = cache[source]
    return after


def _caches(draw: Draw, dtype: str) -> dict[str, Tensor]:
    return {n: draw.coarse(dtype, PAGES, SIZE, HEADS, DIM) for n in CACHES}


def _finish(
    name: str,
    call: str,
    inputs: dict[str, Tensor],
    after: dict[str, np.ndarray],
    layout: str | None,
    view: Any,
    error: bool,
    op: str,
) -> Case:
    if layout == "HND":
        inputs |= {n: tensor(inputs[n].dtype, inputs[n].values.swapaxes(1, 2)) for n in CACHES}
        after = {n: a.swapaxes(1, 2) for n, a in after.items()}
    inputs = view(inputs) if view else inputs
    if error:
        return bad_data(name, op, inputs, layout=layout)
    return Case(
        name, call, inputs, {n: Expected(inputs[n].dtype, a, exact=True) for n, a in after.items()}, layout=layout
    )


def _append(
    name: str,
    dtype: str = "float32",
    cache: str | None = None,
    *,
    slots: list[int] | None = None,
    index: str = "int64",
    layout: str | None = None,
    call: str = APPEND,
    edit: Any = None,
    view: Any = None,
    error: bool = False,
) -> Case:
    draw = Draw(APPEND, name)
    slots = [5, 0, 3] if slots is None else slots
    stored = cache or dtype
    inputs = {n: draw.floats(dtype, len(slots), HEADS, DIM) for n in ("key", "value")}
    inputs |= _caches(draw, stored) | {"slot_mapping": tensor(index, np.array(slots, dtype=np.int64))}
    inputs = edit(inputs) if edit else inputs
    for new in ("key", "value") if stored != "float64" else ():
        for x in inputs[new].values.ravel():
            twice = rounded(stored, rounded("float32", float(x)))
            assert twice == rounded(stored, float(x)) or np.isnan(x), "rounding hangs on a detour over float32"
    after = (
        {}
        if error
        else {n: appended(inputs[n].values, inputs[n.removesuffix("_cache")].values, slots, stored) for n in CACHES}
    )
    return _finish(name, call, inputs, after, layout, view, error, APPEND)


def _appends() -> Iterator[Case]:
    for dtype in FLOATS:
        yield _append(dtype, dtype)
        yield _append(f"{dtype}_hnd_int32", dtype, layout="HND", index="int32")
        for cache in FLOATS_AND_FP8:
            if cache != dtype:
                yield _append(f"{dtype}_into_{cache}", dtype, cache, slots=[4, 1])
    yield _append("nhd_said", layout="NHD")
    yield _append("negative_slots_are_skipped", slots=[-1, 4, -7])
    yield _append("only_padding", slots=[-1, -1])
    yield _append("later_tokens_win", slots=[2, 5, 2, 2])
    yield _append("first_and_last_slot", slots=[PAGES * SIZE - 1, 0])
    yield _append("every_slot", slots=[5, 4, 3, 2, 1, 0], layout="HND")
    yield _append("no_tokens", slots=[])
    yield _append("nan_is_written", "bfloat16", edit=lambda x: x | {"key": with_value(x["key"], (0, 1, 1), NAN)})
    yield _append(
        "key_transposed_value_gaps",
        view=lambda x: x | {"key": transposed(x["key"], 0, 1), "value": every_other(x["value"])},
    )
    yield _append(
        "caches_strided",
        "bfloat16",
        view=lambda x: (
            x | {"key_cache": transposed(x["key_cache"], 1, 2), "value_cache": padded_rows(x["value_cache"])}
        ),
    )
    yield _append(
        "caches_strided_hnd",
        layout="HND",
        view=lambda x: (
            x | {"key_cache": every_other(x["key_cache"]), "value_cache": transposed(x["value_cache"], 1, 2)}
        ),
    )
    yield _append("slots_gaps", view=lambda x: x | {"slot_mapping": every_other(x["slot_mapping"])})
    yield _append("alias_kv_append", call="kv_append")
    yield _append("error_slot_beyond_the_cache", slots=[1, PAGES * SIZE], error=True)
    yield _append("error_slot_far_beyond_hnd", slots=[1 << 40, 0], layout="HND", error=True)


def _compact(
    name: str,
    dtype: str = "float32",
    *,
    moves: list[list[int]] | None = None,
    index: str = "int64",
    layout: str | None = None,
    call: str = COMPACT,
    edit: Any = None,
    view: Any = None,
    error: bool = False,
) -> Case:
    moves = [[2, 0], [1, 2]] if moves is None else moves
    inputs = _caches(Draw(COMPACT, name), dtype) | {
        "moves": tensor(index, np.reshape(moves, (len(moves), 2)).astype(np.int64))
    }
    inputs = edit(inputs) if edit else inputs
    after = {} if error else {n: moved(inputs[n].values, moves) for n in CACHES}
    return _finish(name, call, inputs, after, layout, view, error, COMPACT)


def _compacts() -> Iterator[Case]:
    for dtype in FLOATS_AND_FP8:
        yield _compact(dtype, dtype)
        yield _compact(f"{dtype}_hnd_int32", dtype, layout="HND", index="int32")
    yield _compact("nhd_said", layout="NHD")
    yield _compact("swap", moves=[[0, 1], [1, 0]])
    yield _compact("chain", moves=[[0, 1], [1, 2]])
    yield _compact("chain_backwards", moves=[[1, 2], [0, 1]])
    yield _compact("cycle", moves=[[0, 1], [1, 2], [2, 0]], layout="HND")
    yield _compact("one_page_to_many", moves=[[2, 0], [2, 1]])
    yield _compact("onto_itself", moves=[[1, 1]])
    yield _compact("no_moves", moves=[])
    yield _compact(
        "nan_is_moved", "bfloat16", edit=lambda x: x | {"key_cache": with_value(x["key_cache"], (2, 1, 0, 1), NAN)}
    )
    yield _compact(
        "caches_strided",
        view=lambda x: (
            x | {"key_cache": transposed(x["key_cache"], 1, 2), "value_cache": every_other(x["value_cache"])}
        ),
    )
    yield _compact(
        "caches_strided_hnd_swap",
        moves=[[0, 2], [2, 0]],
        layout="HND",
        view=lambda x: (
            x | {"key_cache": padded_rows(x["key_cache"]), "value_cache": transposed(x["value_cache"], 0, 1)}
        ),
    )
    yield _compact("moves_transposed", view=lambda x: x | {"moves": transposed(x["moves"], 0, 1)})
    yield _compact("alias_kv_compact", call="kv_compact")
    yield _compact("error_source_beyond_the_cache", moves=[[1, 0], [PAGES, 1]], error=True)
    yield _compact("error_target_beyond_the_cache", moves=[[1, 0], [1, PAGES]], error=True)


CASES = {APPEND: _appends, COMPACT: _compacts}


def check() -> None:
    """Writing to every slot, in order, is the new tokens themselves; moving is indexing."""
    draw = Draw("kv_cache")
    cache, new = draw.floats("float32", 3, 2, 1, 2).values, draw.floats("float32", 6, 1, 2).values
    assert np.array_equal(appended(cache, new, list(range(6)), "float32"), new.reshape(3, 2, 1, 2))
    assert np.array_equal(moved(cache, [[0, 1], [1, 2], [2, 0]]), cache[[2, 0, 1]])
