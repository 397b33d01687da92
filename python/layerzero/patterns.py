"""Operations that a model writes out in torch's small functions: found in what a forward pass called.

``weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))`` is one call of ``rms_norm``. So are rotary positions,
the gelu by tanh and attention by ``matmul`` and ``softmax``. Which function made which tensor is known (:class:`Node`); each
finder below looks at one node and at what its inputs were made by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

#: Functions that only change the dtype or the place in memory.
_CASTS = frozenset(["to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous", "clone"])
_MUL = frozenset(["mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"])
_ADD = frozenset(["add", "add_", "__add__", "__radd__", "__iadd__"])
_SUB = frozenset(["sub", "sub_", "__sub__"])
_DIV = frozenset(["div", "div_", "true_divide", "__truediv__", "__itruediv__"])
_PRODUCT = frozenset(["matmul", "__matmul__", "bmm", "baddbmm"])
#: What may lie between the scores and the softmax, and between the softmax and the second product.
_RESHAPES = frozenset(["view", "reshape", "dropout", *_CASTS])
_MASKS = frozenset(["masked_fill", "masked_fill_", "where", *_ADD])


#: Where a call that is written out may end: the module is noted there.
ROOTS = _MUL | _DIV | _ADD | _PRODUCT | {"cat", "concat", "stack", "view_as_real"}


class Node:
    """One call of a torch function."""

    __slots__ = ("args", "bytes", "covered", "flops", "kwargs", "made_by", "module", "name", "result", "times")

    def __init__(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, made_by: dict[int, Node]
    ) -> None:
        self.name, self.args, self.kwargs, self.result = name, args, kwargs, result
        #: What made each of its tensors, by the tensor's id.
        self.made_by = made_by
        self.module = ""
        #: How often it is called.
        self.times = 1
        self.flops, self.bytes = 0, 0
        #: Whether it is a call of ours, or a part of one.
        self.covered = False

    def __call__(self, place: int, name: str = "") -> Value:
        """One of its arguments."""
        given = self.args[place] if place < len(self.args) else self.kwargs.get(name)
        return Value(given, self.made_by.get(id(given)))

    def pairs(self) -> Iterator[tuple[Value, Value]]:
        """Its two operands, in both orders."""
        if len(self.args) >= 2:
            yield self(0), self(1)
            yield self(1), self(0)


class Value(NamedTuple):
    """A tensor or a number, and what made it."""

    given: Any
    node: Node | None

    def made(self, names: frozenset[str] | str) -> Node | None:
        """What made it, if it is one of these functions."""
        wanted = {names} if isinstance(names, str) else names
        return self.node if self.node is not None and self.node.name in wanted else None

    def uncast(self, passed: list[Node] | None = None) -> Value:
        """What it was before its dtype was changed."""
        value = self
        while (node := value.made(_CASTS)) is not None:
            if passed is not None:
                passed.append(node)
            value = node(0)
        return value

    def is_number(self, number: float | None = None) -> bool:
        """Whether it is a number, or this one."""
        plain = isinstance(self.given, int | float) and not isinstance(self.given, bool)
        return plain and (number is None or math.isclose(self.given, number, rel_tol=1e-3))


class Found(NamedTuple):
    """A call that is written out."""

    function: str
    #: Tensors as they are, or as shapes with a dtype (:class:`Table`).
    arguments: dict[str, Any]
    #: What it is written in, the last one first.
    nodes: list[Node]


class Table(NamedTuple):
    """A tensor that the written-out call has in another shape."""

    like: Tensor
    shape: tuple[int, ...]
    dtype: Any = None


def _last_dim(value: Any, rank: int) -> bool:
    dims = value if isinstance(value, tuple | list) else [value]
    return len(dims) == 1 and dims[0] in (-1, rank - 1)


def _mean_square(value: Value, parts: list[Node]) -> Value | None:
    """The tensor whose mean square over the last dimension this is."""
    mean = value.made("mean")
    if mean is None or not isinstance(mean(0).given, Tensor):
        return None
    if not _last_dim(mean(1, "dim").given, mean(0).given.dim()):
        return None
    square = mean(0).made(frozenset(["pow", "square", *_MUL]))
    if square is None or (square.name == "pow" and not square(1, "exponent").is_number(2)):
        return None
    if square.name in _MUL and square(0).given is not square(1).given:
        return None
    parts += [mean, square]
    return square(0)


def rms_norm(node: Node, users: Callable[[Node], Sequence[Node]]) -> Found | None:
    """``x * rsqrt(mean(x²) + eps)``, or ``x / sqrt(…)``, and the weight it is multiplied by."""
    if node.name not in _MUL and node.name not in _DIV:
        return None
    for scaled, factor in node.pairs():
        root = factor.made("rsqrt" if node.name in _MUL else "sqrt")
        if root is None:
            continue
        parts, eps, inside = [node, root], 0.0, root(0)
        if (added := inside.made(_ADD)) is not None:
            for one, other in added.pairs():
                if other.is_number():
                    parts.append(added)
                    inside, eps = one, float(other.given)
                    break
        squared = _mean_square(inside, parts)
        if squared is None:
            continue
        source = squared.uncast(parts)
        if scaled.uncast(parts).given is not source.given:
            continue
        weight, last = _weight_of(node, source.given.shape[-1], users, parts)
        arguments = {"input": source.given, "weight": weight, "eps": eps}
        return Found("rms_norm", arguments, [last, *parts])
    return None


def _weight_of(
    node: Node, width: int, users: Callable[[Node], Sequence[Node]], parts: list[Node]
) -> tuple[Tensor | None, Node]:
    """The weight that a normalized tensor is multiplied by, and the last function of it all."""
    last = node
    while True:
        after = [user for user in users(last) if user.name in _CASTS or user.name in _MUL]
        if len(after) != 1:
            return None, last
        (user,) = after
        if user.name in _CASTS:
            parts.append(user)
            last = user
            continue
        for one, other in user.pairs():
            weight = other.uncast(parts)
            if (shifted := weight.made(_ADD)) is not None:
                tensors = [value for value in (shifted(0), shifted(1)) if isinstance(value.given, Tensor)]
                if len(tensors) == 1 and any(value.is_number(1) for value in (shifted(0), shifted(1))):
                    parts.append(shifted)
                    weight = tensors[0].uncast(parts)
            given = weight.given
            if one.given is last.result and isinstance(given, Tensor) and tuple(given.shape) == (width,):
                return given, user
        return None, last


def add_before(found: Found, made_by: Callable[[Tensor], Node | None]) -> Found | None:
    """A norm of a sum, with the addition in it."""
    x = found.arguments["input"]
    added = made_by(x)
    if added is None or added.name not in _ADD or found.arguments.get("weight") is None:
        return None
    one, other = added(0).given, added(1).given
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return None
    if one.shape != x.shape or other.shape != x.shape or one.dtype != x.dtype or other.dtype != x.dtype:
        return None
    # Which of the two is the residual makes no difference to what it costs.
    kept = {name: found.arguments[name] for name in ("weight", "eps")}
    return Found("fused_add_rms_norm", {"input": one, "residual": other, **kept}, [])


def _halves(one: Value, other: Value) -> tuple[Tensor, bool] | None:
    """The tensor of which these are the two halves, and whether they are every other element."""
    if one.node is None or other.node is None:
        return None
    base, again = one.node(0).given, other.node(0).given
    if base is not again or not isinstance(base, Tensor):
        return None
    half = base.shape[-1] // 2
    if any(value.given.shape[-1] != half or value.given.dim() != base.dim() for value in (one, other)):
        return None
    if one.node.name == "__getitem__":
        return base, one.given.stride(-1) == 2 * base.stride(-1)
    return (base, False) if one.node.name in ("chunk", "split", "tensor_split", "narrow", "unbind") else None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, nodes: list[Node]) -> Found | None:
    """A call of rope; the table has a row for each position."""
    if x.dim() != 4 or not isinstance(cos, Tensor) or not isinstance(sin, Tensor):
        return None
    # Heads are where the table is broadcast.
    aligned = (1,) * (4 - cos.dim()) + tuple(cos.shape)
    by_heads = aligned[1] == 1 and aligned[2] == x.shape[2]
    if not by_heads and not (aligned[2] == 1 and aligned[1] == x.shape[1]):
        return None
    length, rot = (x.shape[2] if by_heads else x.shape[1]), x.shape[3] // 2
    arguments: dict[str, Any] = {"input": x, "layout": "BHSD" if by_heads else "BSHD"}
    rows = aligned[0] * length
    dtype = x.dtype if cos.is_complex() else cos.dtype
    arguments |= {"cos": Table(cos, (rows, rot), dtype), "sin": Table(sin, (rows, rot), dtype)}
    if aligned[0] > 1:
        import torch

        arguments["positions"] = Table(cos, (x.shape[0], length), torch.int64)
    if interleaved:
        arguments["interleaved"] = True
    return Found("rope", arguments, nodes)


def rope(node: Node, users: Callable[[Node], Sequence[Node]]) -> Found | None:
    """Rotary positions, in one of the three ways they are written."""
    if node.name in _ADD:
        return _rope_by_half(node)
    if node.name in ("cat", "concat", "stack"):
        return _rope_by_pair(node)
    if node.name == "view_as_real":
        return _rope_by_complex(node)
    return None


def _rope_by_half(node: Node) -> Found | None:
    """``x * cos + cat((-x2, x1)) * sin``."""
    for one, other in node.pairs():
        straight, turned = one.made(_MUL), other.made(_MUL)
        if straight is None or turned is None:
            continue
        for rotated, sin in turned.pairs():
            joined = rotated.made(frozenset(["cat", "concat"]))
            if joined is None or len(pieces := joined.args[0] if joined.args else ()) != 2:
                continue
            first, second = (Value(piece, joined.made_by.get(id(piece))) for piece in pieces)
            negated = first.made(frozenset(["neg", "__neg__", "negative"]))
            halves = _halves(second, negated(0)) if negated is not None else None
            for x, cos in straight.pairs():
                if halves is not None and negated is not None and x.given is halves[0]:
                    source, interleaved = _before_pairing(x)
                    nodes = [node, straight, turned, joined, negated]
                    return _rotated(source, cos.given, sin.given, interleaved, nodes)
    return None


def _before_pairing(x: Value) -> tuple[Any, bool]:
    """The tensor before its pairs of neighbours were put into halves."""
    if (flat := x.made("reshape")) is not None and (swapped := flat(0).made("transpose")) is not None:
        paired = swapped(0).made(frozenset(["view", "reshape"]))
        if paired is not None and paired(0).given.dim() == x.given.dim() and paired.result.shape[-1] == 2:
            return paired(0).given, True
    return x.given, False


def _rope_by_pair(node: Node) -> Found | None:
    """``cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin))``."""
    pieces = node.args[0] if node.args and isinstance(node.args[0], tuple | list) else ()
    if len(pieces) != 2:
        return None
    first, second = (Value(piece, node.made_by.get(id(piece))) for piece in pieces)
    less, more = first.made(_SUB), second.made(_ADD)
    if less is None or more is None:
        return None
    left, right = less(0).made(_MUL), less(1).made(_MUL)
    if left is None or right is None:
        return None
    halves = _halves(left(0), right(0))
    if halves is None:
        return None
    return _rotated(halves[0], left(1).given, right(1).given, halves[1], [node, less, more, left, right])


def _rope_by_complex(node: Node) -> Found | None:
    """``view_as_real(view_as_complex(pairs of x) * frequencies)``."""
    product = node(0).made(_MUL)
    if product is None:
        return None
    for one, frequencies in product.pairs():
        paired = one.made("view_as_complex")
        shaped = paired(0).made(frozenset(["view", "reshape", "unflatten"])) if paired is not None else None
        if shaped is None or paired is None or not isinstance(frequencies.given, Tensor):
            continue
        x = shaped(0).uncast().given
        return _rotated(x, frequencies.given, frequencies.given, True, [node, product, paired])
    return None


def gelu(node: Node, users: Callable[[Node], Sequence[Node]]) -> Found | None:
    """``0.5 * x * (1 + tanh(… x³ …))``, or by ``erf``."""
    if node.name not in _MUL:
        return None
    for one, factor in node.pairs():
        shifted = factor.made(_ADD)
        if shifted is None:
            continue
        for curve, unit in shifted.pairs():
            bent = curve.made(frozenset(["tanh", "erf"]))
            if bent is None or not unit.is_number(1):
                continue
            parts = [node, shifted, bent]
            x = _halved(one, parts)
            if x is not None and (_cubic if bent.name == "tanh" else _by_root_two)(bent(0), x, parts):
                return Found("gelu", {"input": x, "approximate": "tanh" if bent.name == "tanh" else "none"}, parts)
    return None


def _halved(value: Value, parts: list[Node]) -> Tensor | None:
    """The tensor that this is half of."""
    half = value.made(_MUL)
    if half is None:
        return None
    for x, number in half.pairs():
        if number.is_number(0.5) and isinstance(x.given, Tensor):
            parts.append(half)
            return x.given
    return None


def _times(value: Value, number: float, parts: list[Node]) -> Value | None:
    """What this is so many times of."""
    node = value.made(_MUL)
    for one, other in node.pairs() if node is not None else ():
        if other.is_number(number):
            parts.append(node)  # type: ignore[arg-type]
            return one
    return None


def _cubic(value: Value, x: Tensor, parts: list[Node]) -> bool:
    """Whether this is ``sqrt(2 / pi) * (x + 0.044715 * x³)``, or the same with ``x`` before the bracket."""
    product = value.made(_MUL)
    for one, other in product.pairs() if product is not None else ():
        scaled, bracket = _times(one, math.sqrt(2 / math.pi), parts), other.made(_ADD)
        for square, unit in bracket.pairs() if bracket is not None else ():
            if scaled is not None and scaled.given is x and unit.is_number(1) and _squared(square, x, parts):
                parts += [product, bracket]  # type: ignore[list-item]
                return True
    summed = _times(value, math.sqrt(2 / math.pi), parts)
    added = summed.made(_ADD) if summed is not None else None
    for one, other in added.pairs() if added is not None else ():
        cube = _times(other, 0.044715, parts)
        power = cube.made("pow") if cube is not None else None
        if one.given is x and power is not None and power(0).given is x and power(1, "exponent").is_number(3):
            parts += [added, power]  # type: ignore[list-item]
            return True
    return False


def _squared(value: Value, x: Tensor, parts: list[Node]) -> bool:
    """Whether this is ``0.044715 * x * x``."""
    node = value.made(_MUL)
    for one, other in node.pairs() if node is not None else ():
        inner = _times(one, 0.044715, parts)
        if other.given is x and inner is not None and inner.given is x:
            parts.append(node)  # type: ignore[arg-type]
            return True
    return False


def _by_root_two(value: Value, x: Tensor, parts: list[Node]) -> bool:
    """Whether this is ``x / sqrt(2)``."""
    divided = value.made(_DIV)
    if divided is not None and divided(0).given is x and divided(1).is_number(math.sqrt(2)):
        parts.append(divided)
        return True
    scaled = _times(value, math.sqrt(0.5), parts)
    return scaled is not None and scaled.given is x


def attention(node: Node, users: Callable[[Node], Sequence[Node]]) -> Found | None:
    """``softmax(q @ k.transpose(-2, -1) * scale + mask) @ v``."""
    if node.name not in _PRODUCT or node.name == "baddbmm" or len(node.args) < 2:
        return None
    value, parts = node(1).given, [node]
    back = node(0)
    while (between := back.made(_RESHAPES)) is not None:
        parts.append(between)
        back = between(0)
    soft = back.made("softmax")
    if soft is None or not _last_dim(soft(1, "dim").given, back.given.dim()):
        return None
    parts.append(soft)
    back, scale, mask = soft(0, "input"), 1.0, None
    while (between := back.made(_RESHAPES | _MASKS | _MUL | _DIV)) is not None:
        parts.append(between)
        one, other = between(0), between(1)
        if between.name in _MUL and other.is_number():
            scale *= other.given
        elif between.name in _DIV and other.is_number():
            scale /= other.given
        elif between.name in _MUL or between.name in _DIV:
            return None
        elif between.name in _MASKS:
            mask = other.given if between.name != "where" else one.given
            one = one if between.name != "where" else other
        back = one
    scores = back.made(_PRODUCT)
    if scores is None:
        return None
    parts.append(scores)
    offset = 1 if scores.name == "baddbmm" else 0
    mask = scores(0).given if offset else mask
    scale *= scores.kwargs.get("alpha", 1.0) if offset else 1.0
    first, second = scores(offset, "batch1"), scores(offset + 1, "batch2")
    if isinstance(value, Tensor) and all(
        isinstance(one.given, Tensor) and one.given.dtype != value.dtype for one in (first, second)
    ):
        # Scores that are computed in another dtype.
        swapped = second.made("transpose")
        first = first.uncast(parts)
        if swapped is not None and isinstance(before := swapped(0).uncast(parts).given, Tensor):
            second = Value(before.transpose(-2, -1), None)
    query, key = first.given, second.given
    if not all(isinstance(tensor, Tensor) and tensor.dim() in (3, 4) for tensor in (query, key, value)):
        return None
    if query.dim() != key.dim() or value.dim() != query.dim() or scores.result.shape[-1] != value.shape[-2]:
        return None
    heads = [tensor.unsqueeze(1) if tensor.dim() == 3 else tensor for tensor in (query, key.transpose(-2, -1), value)]
    arguments: dict[str, Any] = dict(zip(("query", "key", "value"), heads, strict=True))
    if not math.isclose(scale, query.shape[-1] ** -0.5, rel_tol=1e-6):
        arguments["scale"] = scale
    if isinstance(mask, Tensor):
        import torch

        sizes = (heads[0].shape[2], heads[1].shape[2])
        leading = tuple(mask.shape[:-2])
        known = {2: (1, 1), 3: (leading[0] if leading else 1, 1), 4: leading}.get(mask.dim(), (1, 1))
        dtype = torch.bool if mask.dtype == torch.bool else query.dtype
        arguments["attn_mask"] = Table(mask, (*known, *sizes), dtype)
    return Found("attention", {**arguments, "causal": False, "layout": "BHSD"}, parts)


#: What is looked for at each node, in this order.
FINDERS: tuple[Callable[[Node, Callable[[Node], Sequence[Node]]], Found | None], ...] = (
    rms_norm,
    rope,
    gelu,
    attention,
)


def find(nodes: Sequence[Node]) -> list[tuple[Node, Found]]:
    """Every call that is written out in these, each with the node where it is complete, in order."""
    using: dict[int, list[Node]] = {}
    for node in nodes:
        for made in {id(maker): maker for maker in node.made_by.values()}.values():
            using.setdefault(id(made), []).append(node)

    def users(node: Node) -> Sequence[Node]:
        return using.get(id(node), ())

    found = []
    for node in nodes:
        if node.covered:
            continue
        for finder in FINDERS:
            one = finder(node, users)
            if one is not None:
                for part in one.nodes:
                    part.covered = True
                found.append((node, one))
                break
    return found
