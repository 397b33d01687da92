"""Sampling. Uniform numbers keep clear of the boundaries between tokens, so that rounding decides nothing."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

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
from .number import FLOATS, exp, total

MARGIN = 1e-6
VOCAB = 11


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    weights = [exp(x - top) for x in row]
    return [w / total(weights) for w in weights]


def kept_by_count(row: list[float], k: int) -> list[int]:
    """The k largest, by descending logit, the lower index first among equals."""
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


def kept_by_mass(row: list[float], p: float) -> list[int]:
    """The fewest tokens, by descending logit, whose probability reaches p."""
    probabilities = softmax(row)
    kept: list[int] = []
    for i in kept_by_count(row, len(row)):
        kept.append(i)
        mass = total(probabilities[j] for j in kept)
        assert p == 1.0 or abs(mass - p) > MARGIN, "p is too close to a cumulative probability"
        if mass >= p:
            break
    return kept


def intervals(weights: list[float]) -> list[tuple[float, float]]:
    """What part of [0, 1) each of the weights owns once normalized."""
    sums = [total(weights[:i]) / total(weights) for i in range(len(weights) + 1)]
    return list(itertools.pairwise(sums))


def pick(weights: list[float], u: float) -> int:
    """The first whose cumulative share exceeds u."""
    found = next(i for i, (_, end) in enumerate(intervals(weights)) if end > u)
    low, high = intervals(weights)[found]
    assert (u - low > MARGIN or low == 0) and high - u > MARGIN, "a uniform number is too close to a boundary"
    return found


def _kept(row: list[float], rule: dict[str, Any]) -> list[int]:
    return kept_by_count(row, rule["k"]) if "k" in rule else kept_by_mass(row, rule["p"])


def sampled(row: list[float], rule: dict[str, Any], u: float) -> int:
    if any(map(math.isnan, row)):
        return -1
    kept = _kept(row, rule)
    return kept[pick(softmax([row[i] for i in kept]), u)]


def _case(op: str, name: str, logits: Tensor, uniform: str | Tensor, call: str | None = None, **rule: Any) -> Case:
    """`uniform` is a tensor, or the dtype of one whose numbers pick a token at random."""
    rows = logits.values.reshape(-1, logits.shape[-1]).tolist()
    lead = logits.shape[:-1]
    if isinstance(uniform, str):
        draw, chosen = Draw(op, name, "uniform"), []
        for row in rows:
            kept = _kept([0.0 if math.isnan(x) else x for x in row], rule)
            shares = intervals(softmax([0.0 if math.isnan(row[i]) else row[i] for i in kept]))
            wide = [s for s in shares if s[1] - s[0] > 4 * MARGIN]
            low, high = wide[int(draw.rng.integers(0, len(wide)))]
            chosen.append(round((low + high) / 2, 6))
        uniform = tensor(uniform, np.reshape(chosen, lead))
    ids = [sampled(row, rule, u) for row, u in zip(rows, uniform.values.ravel().tolist(), strict=True)]
    expect = {"ids": Expected("int64", np.array(ids, dtype=np.int64).reshape(lead), exact=True)}
    return Case(name, call or op, {"logits": logits, "uniform": uniform}, expect, rule)


def _logits(op: str, name: str, dtype: str, *shape: int) -> Tensor:
    return Draw(op, name).floats(dtype, *shape, bound=3.0)


def _both(op: str, rule: dict[str, Any], few: dict[str, Any], alias: str) -> Iterator[Case]:
    """Cases of top-k and top-p alike; `few` keeps only one token."""
    for dtype in FLOATS:
        for u in ("float32", "float64"):
            name = f"{dtype}_uniform_{u}"
            yield _case(op, name, _logits(op, name, dtype, 4, VOCAB), u, **rule)
    logits = Draw(op, "edges").coarse("float32", 3, VOCAB, bound=2.0)
    yield _case(op, "uniform_zero_is_the_most_likely", logits, tensor("float32", [0.0, 0.0, 0.0]), **rule)
    yield _case(op, "uniform_almost_one", logits, tensor("float64", [0.999, 0.9999, 0.99]), **rule)
    yield _case(op, "keeps_one", logits, tensor("float32", [0.0, 0.5, 0.999]), **few)
    yield _case(op, "nan_row", with_value(logits, (1, 4), NAN), "float32", **rule)
    yield _case(op, "nan_that_would_not_be_kept", with_value(logits, (0, 0), NAN), "float32", **few)
    yield _case(
        op, "nan_bfloat16", with_value(tensor("bfloat16", logits.values), (2, VOCAB - 1), NAN), "float32", **rule
    )
    yield _case(
        op,
        "minus_infinity_is_never_drawn",
        tensor("float32", [[-INF, 1.0, -INF, 0.5], [0.0, -INF, -INF, -INF]]),
        tensor("float32", [0.9, 0.9]),
        **rule,
    )
    yield _case(
        op, "large_logits", tensor("float32", [[1000.0, 1000.5, 999.0], [-1000.0, -1001.0, -1000.5]]), "float32", **rule
    )
    yield _case(op, "rank_1", _logits(op, "rank_1", "float32", VOCAB), "float32", **rule)
    yield _case(op, "rank_3", _logits(op, "rank_3", "float32", 2, 2, VOCAB), "float64", **rule)
    yield _case(op, "no_rows", tensor("float32", np.zeros((0, 5))), tensor("float32", np.zeros(0)), **rule)
    yield _case(op, "one_token", tensor("float32", [[0.25], [-3.0]]), tensor("float32", [0.0, 0.75]), **rule)
    yield _case(op, "logits_transposed", transposed(logits, 0, 1), "float32", **rule)
    yield _case(op, "logits_gaps", every_other(logits), "float32", **rule)
    yield _case(
        op, "logits_padded_uniform_gaps", padded_rows(logits), every_other(tensor("float32", [0.2, 0.5, 0.05])), **rule
    )
    yield _case(op, "alias", logits, "float32", alias, **rule)


TOPK, TOPP, SPECULATIVE = "sampling.topk", "sampling.topp", "sampling.speculative"
TIED = [[1.0, 2.0, 2.0, 0.0, 2.0]] * 3


def _topks() -> Iterator[Case]:
    yield from _both(TOPK, {"k": 4}, {"k": 1}, "sample_topk")
    logits = _logits(TOPK, "k", "float32", 3, VOCAB)
    yield _case(TOPK, "k_is_the_vocabulary", logits, "float32", k=VOCAB)
    yield _case(TOPK, "k_beyond_the_vocabulary", logits, "float64", k=100)
    yield _case(TOPK, "ties_keep_the_lower_index", tensor("float32", TIED), tensor("float32", [0.2, 0.75, 0.99]), k=2)
    yield _case(TOPK, "ties_in_index_order", tensor("float32", TIED), tensor("float32", [0.1, 0.5, 0.9]), k=3)
    yield _case(TOPK, "ties_behind", tensor("bfloat16", TIED), tensor("float32", [0.1, 0.6, 0.995]), k=4)
    yield _case(TOPK, "ties_keep_one", tensor("float16", TIED), tensor("float32", [0.0, 0.5, 0.99]), k=1)
    yield _case(TOPK, "everything_equal", tensor("float32", np.zeros((3, 6))), tensor("float32", [0.1, 0.4, 0.9]), k=4)


def _topps() -> Iterator[Case]:
    yield from _both(TOPP, {"p": 0.8}, {"p": 1e-6}, "sample_topp")
    logits = _logits(TOPP, "p", "float32", 3, VOCAB)
    yield _case(TOPP, "p_one_keeps_all", logits, "float32", p=1.0)
    yield _case(
        TOPP, "p_one_last_token", tensor("float32", [[3.0, 2.0, 2.5]] * 3), tensor("float32", [0.1, 0.7, 0.99]), p=1.0
    )
    yield _case(TOPP, "p_almost_one", logits, "float64", p=0.999)
    yield _case(TOPP, "p_half", logits, "float64", p=0.5)
    # Shares 1/2, 1/4, 1/8, 1/8 (up to rounding): the one that reaches p belongs to the kept.
    halves = tensor("float64", [[math.log(8), math.log(4), math.log(2), math.log(2)]] * 3)
    yield _case(TOPP, "the_one_that_reaches_p", halves, tensor("float64", [0.5, 0.7, 0.9]), p=0.6)
    yield _case(TOPP, "ties_keep_the_lower_index", tensor("float32", TIED), tensor("float32", [0.2, 0.75, 0.99]), p=0.4)
    yield _case(TOPP, "ties_in_index_order", tensor("bfloat16", TIED), tensor("float32", [0.1, 0.5, 0.9]), p=0.75)
    yield _case(
        TOPP, "everything_equal", tensor("float32", np.zeros((3, 6))), tensor("float32", [0.1, 0.4, 0.9]), p=0.6
    )


def verified(
    draft_ids: list[int], draft: list[list[float]], target: list[list[float]], uniform: list[float]
) -> tuple[list[int], int]:
    """One row: the ids and how many were accepted."""
    for i, t in enumerate(draft_ids):
        weighed = uniform[i] * draft[i][t]
        assert weighed == 0 or abs(weighed - target[i][t]) > MARGIN, "acceptance hangs on rounding"
        if not weighed < target[i][t]:
            left = [max(q - p, 0.0) for q, p in zip(target[i], draft[i], strict=True)]
            drawn = drawn_from(left if any(left) else target[i], uniform[-1], normalized=any(left))
            return draft_ids[:i] + [drawn] + [-1] * (len(draft_ids) - i), i
    return [*draft_ids, drawn_from(target[-1], uniform[-1], normalized=False)], len(draft_ids)


def drawn_from(weights: list[float], u: float, normalized: bool) -> int:
    """Rows of low-precision probabilities do not sum to one: the pick must not hang on whether they are normalized."""
    found = pick(weights, u)
    sums = [total(weights[: i + 1]) for i in range(len(weights))]
    assert normalized or next(i for i, s in enumerate(sums) if s > u + MARGIN) == found
    return found


def _distributions(draw: Draw, full_precision: bool, *shape: int) -> np.ndarray:
    """Rows that sum to one: of any numbers, or of multiples of 1/64."""
    weights = draw.rng.integers(1, 40, shape).astype(np.float64)
    if full_precision:
        return np.asarray(weights / weights.sum(-1, keepdims=True))
    whole = np.floor(weights / weights.sum(-1, keepdims=True) * 60) + 1
    whole[..., :1] += 64 - whole.sum(-1, keepdims=True)
    return np.asarray(whole / 64)


def _speculative(
    name: str,
    dtype: str = "float32",
    u: str = "float32",
    *,
    plan: list[int],
    steps: int = 3,
    vocab: int = 5,
    full_precision: bool = False,
    index: str = "int64",
    call: str = SPECULATIVE,
    edit: Any = None,
    view: Any = None,
) -> Case:
    """`plan` says for each row how many tokens are accepted."""
    draw = Draw(SPECULATIVE, name)
    batch = len(plan)
    draft = tensor(dtype, _distributions(draw, full_precision, batch, steps, vocab))
    target = tensor(dtype, _distributions(draw, full_precision, batch, steps + 1, vocab))
    ids = np.zeros((batch, steps), dtype=np.int64)
    uniform = np.zeros((batch, steps + 1))
    for b, accepted in enumerate(plan):
        for i in range(steps):
            p, q = draft.values[b, i], target.values[b, i]
            if i < accepted:
                t = int(draw.rng.integers(0, vocab))
                uniform[b, i] = round(0.7 * min(1.0, q[t] / p[t]), 4)
            else:
                t = int(np.argmax(p - q))
                uniform[b, i] = round((1 + q[t] / p[t]) / 2, 4)
            ids[b, i] = t
        uniform[b, steps] = round(0.153 + 0.7 * b / max(batch, 1), 4)
    inputs = {
        "draft_ids": tensor(index, ids),
        "draft_probs": draft,
        "target_probs": target,
        "uniform": tensor(u, uniform),
    }
    inputs = edit(inputs) if edit else inputs
    x = [inputs[n].values.tolist() for n in ("draft_ids", "draft_probs", "target_probs", "uniform")]
    rows = [verified(*row) for row in zip(*x, strict=True)]
    assert edit or [n for _, n in rows] == plan
    expect = {
        "ids": Expected("int64", np.array([r[0] for r in rows], dtype=np.int64).reshape(batch, steps + 1), exact=True),
        "accepted": Expected("int64", np.array([r[1] for r in rows], dtype=np.int64), exact=True),
    }
    return Case(name, call, view(inputs) if view else inputs, expect)


def _unlikely_token(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Both models give the first drafted token no chance, and agree on the rest."""
    same = np.array([0.0, 0.25, 0.5, 0.25])
    target = inputs["target_probs"].values.copy()
    target[:, 0] = same
    draft = inputs["draft_probs"].values.copy()
    draft[:, 0] = same
    ids = inputs["draft_ids"].values.copy()
    ids[:, 0] = 0
    return inputs | {
        "draft_ids": tensor("int64", ids),
        "draft_probs": tensor("float32", draft),
        "target_probs": tensor("float32", target),
    }


def _certain(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The draft is sure of token 2, the target of token 1: the residual is one token."""
    draft, target = np.zeros((1, 2, 4)), np.zeros((1, 3, 4))
    draft[..., 2] = 1
    target[..., 1] = 1
    return inputs | {
        "draft_ids": tensor("int64", [[2, 2]]),
        "draft_probs": tensor("float32", draft),
        "target_probs": tensor("float32", target),
    }


def _speculatives() -> Iterator[Case]:
    for dtype in FLOATS:
        yield _speculative(dtype, dtype, plan=[3, 0, 1, 2], full_precision=True)
        yield _speculative(f"{dtype}_uniform_float64_int32", dtype, "float64", plan=[1, 2], steps=2, index="int32")
    yield _speculative("accept_all", plan=[3, 3])
    yield _speculative("reject_at_once", plan=[0, 0])
    yield _speculative("reject_at_each_step", plan=[0, 1, 2, 3, 4], steps=4)
    yield _speculative("one_step", plan=[0, 1], steps=1)
    yield _speculative("no_steps", plan=[0, 0], steps=0)
    yield _speculative("no_batch", plan=[])
    yield _speculative("one_token_vocabulary", plan=[2], steps=2, vocab=1)
    yield _speculative("residual_all_zero", plan=[0, 0, 0], steps=2, vocab=4, edit=_unlikely_token)
    yield _speculative("residual_one_token", plan=[0], steps=2, vocab=4, edit=_certain)
    yield _speculative(
        "uniform_zero", plan=[2], steps=2, edit=lambda x: x | {"uniform": tensor("float32", [[0.0] * 3])}
    )
    yield _speculative(
        "uniform_zero_does_not_accept_the_impossible",
        plan=[0],
        steps=2,
        vocab=4,
        edit=lambda x: _certain(x) | {"uniform": tensor("float32", [[0.0] * 3])},
    )
    yield _speculative(
        "strided",
        plan=[1, 3],
        view=lambda x: {
            "draft_ids": transposed(x["draft_ids"], 0, 1),
            "draft_probs": transposed(x["draft_probs"], 1, 2),
            "target_probs": every_other(x["target_probs"]),
            "uniform": padded_rows(x["uniform"]),
        },
    )
    yield _speculative("alias", plan=[1, 3], call="speculative_verify")
    good = _speculative("error", plan=[3])
    for name, token in [("error_token_beyond_the_vocabulary", 5), ("error_negative_token", -1)]:
        yield bad_data(name, SPECULATIVE, good.inputs | {"draft_ids": tensor("int64", [[token, 0, 1]])})


CASES = {TOPK: _topks, TOPP: _topps, SPECULATIVE: _speculatives}


def check() -> None:
    """Sampling over a fine grid of uniform numbers gives back the distribution."""
    row = [0.3, -1.0, 1.2, 0.3, 0.9]
    grid = [(i + 0.5) / 4000 for i in range(4000)]

    def share(rule: dict[str, Any]) -> np.ndarray:
        drawn = []
        for u in grid:
            kept = _kept(row, rule)
            ends = [end for _, end in intervals(softmax([row[i] for i in kept]))]
            drawn.append(kept[next(i for i, end in enumerate(ends) if end > u)])
        return np.bincount(drawn, minlength=5) / len(grid)

    weights = np.exp(row)
    assert np.allclose(share({"k": 5}), weights / weights.sum(), atol=1e-3)
    assert np.allclose(share({"p": 1.0}), weights / weights.sum(), atol=1e-3)
    top = weights * np.isin(np.arange(5), [2, 4, 0])
    assert np.allclose(share({"k": 3}), top / top.sum(), atol=1e-3)
    # Accepting and redrawing gives the target's distribution, whatever the draft's.
    p, q = np.array([0.6, 0.1, 0.3]), np.array([0.2, 0.5, 0.3])
    left = np.maximum(q - p, 0)
    rejected = (p * (1 - np.minimum(1, q / p))).sum()
    assert np.allclose(p * np.minimum(1, q / p) + rejected * left / left.sum(), q)
