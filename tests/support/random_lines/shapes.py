"""Views, permutations, slices, joined and repeated tensors."""

from __future__ import annotations

from random_modules import Writer

from random_lines.making import axis, like, line, one_of


@line(2)
def view(w: Writer) -> str:
    """The same elements with other sizes."""
    a = w.pick(lambda x: x.dim() > 0)
    x = w.tensor(a)
    last = x.shape[-1]
    d = axis(w, x)
    forms = [
        f"{a}.reshape(-1)",
        f"{a}.reshape(B, -1)",
        f"{a}.flatten({w.rng.randrange(x.dim())})",
        f"{a}.flatten(0, 1)",
        f"{a}.unsqueeze({w.rng.randrange(-x.dim() - 1, x.dim() + 1)})",
        f"{a}.squeeze()",
        f"{a}.squeeze({d})",
        f"{a}.reshape(*{a}.shape[:-1], 2, {last // 2})",
        f"{a}.view(*{a}.shape[:-1], {last // 4 or 1}, 4)",
        f"{a}.unflatten(-1, (2, {last // 2}))",
        f"{a}.contiguous().view(-1, {last})",
        f"{a}[None]",
        f"{a}[..., None]",
        f"{a}.reshape(B * S, -1)",
        f"{a}.reshape(B, S, -1)",
        f"{a}.view({a}.shape)",
    ]
    return one_of(w, forms)


@line(2)
def permuted(w: Writer) -> str:
    """The axes in another order."""
    a = w.pick(lambda x: x.dim() > 1)
    x = w.tensor(a)
    order = list(range(x.dim()))
    w.rng.shuffle(order)
    forms = [
        f"{a}.permute({', '.join(map(str, order))})",
        f"{a}.transpose({axis(w, x)}, {axis(w, x)})",
        f"{a}.mT",
        f"{a}.movedim({axis(w, x)}, {axis(w, x)})",
        f"{a}.transpose(-1, -2).contiguous()",
        f"{a}.swapaxes(0, -1)",
    ]
    return one_of(w, forms)


def _part(w: Writer) -> str:
    ends = ["", "", "1", "2", "-1", "-2", "3", "-3", "S", "S // 2", "B", "100", "-100"]
    start, end = w.rng.choice(ends), w.rng.choice(ends)
    step = w.rng.choice(["", "", "", ":1", ":2", ":3"])
    return f"{start}:{end}{step}"


@line(2.5)
def sliced(w: Writer) -> str:
    """Parts of axes, as Python names them."""
    a = w.pick(lambda x: x.dim() > 0)
    x = w.tensor(a)
    parts = [w.rng.choice([":", _part(w), _part(w), "0", "-1", "None", "1"]) for _ in range(w.rng.randint(1, x.dim()))]
    inside = ", ".join(parts)
    if w.rng.random() < 0.4:
        inside = f"..., {inside}"
    return f"{w.fresh()} = {a}[{inside}]"


@line()
def sliced_otherwise(w: Writer) -> str:
    """Parts of axes by functions."""
    a = w.pick(lambda x: x.dim() > 0)
    x = w.tensor(a)
    d = axis(w, x)
    forms = [
        f"{a}.narrow({d}, 0, 1)",
        f"{a}.narrow({d}, -1, 1)",
        f"{a}.select({d}, -1)",
        f"{a}.diagonal(0, -2, -1)",
        f"{a}.unfold({d}, 2, 1)",
        f"{a}.unfold({d}, 1, 2)",
        f"torch.diff({a}, dim={d})",
    ]
    return one_of(w, forms)


@line(2)
def split(w: Writer) -> str:
    """Parts of an axis together."""
    a = w.pick(lambda x: x.dim() > 0)
    x = w.tensor(a)
    d = axis(w, x)
    n = x.shape[d] if x.dim() else 1
    p, q = w.fresh(), w.fresh()
    forms = [
        f"{p}, {q} = {a}.chunk(2, {d})",
        f"{p}, {q} = {a}.split({max(n // 2, 1)}, {d})",
        f"{p}, {q} = {a}.split([1, {n - 1}], {d})",
        f"{p} = {a}.unbind({d})[-1]",
        f"{p} = {a}.chunk(3, {d})[1]",
        f"{p}, *_ = {a}.tensor_split(2, {d})",
        f"{p} = {a}.split(2, {d})[0]",
    ]
    return w.rng.choice(forms)


@line(2)
def joined(w: Writer) -> str:
    """Tensors behind each other, or along a new axis."""
    a = w.pick(lambda x: x.dim() > 0)
    x = w.tensor(a)
    b = w.pick(like(w, a))
    d = axis(w, x)
    forms = [
        f"torch.cat([{a}, {b}], {d})",
        f"torch.cat([{b}, {a}, {a}], {d})",
        f"torch.stack([{a}, {b}], {w.rng.randrange(-x.dim() - 1, x.dim() + 1)})",
        f"torch.cat([{a}, {w.pick()}], {d})",
        f"torch.cat([{a}, {a}[:0]], 0)",
        f"torch.hstack([{a}, {b}])",
        f"torch.cat([{a}.double(), {b}], {d})",
    ]
    return one_of(w, forms)


@line(1.5)
def repeated(w: Writer) -> str:
    """Elements several times."""
    a = w.pick(lambda x: x.dim() > 0)
    x = w.tensor(a)
    d = axis(w, x)
    ones = ", ".join(["1"] * (x.dim() - 1))
    forms = [
        f"{a}.repeat_interleave(2, {d})",
        f"{a}.repeat(2, {', '.join(['1'] * x.dim())})",
        f"{a}.repeat({ones or '1'}, 2)" if x.dim() > 1 else f"{a}.repeat(2)",
        f"{a}.unsqueeze({d}).expand(*[-1] * {x.dim()}, 3)" if d == -1 else f"{a}[None].expand(3, *{a}.shape)",
        f"{a}.flip({d})",
        f"{a}.roll({w.rng.choice([1, -1, 3])}, {d})",
        f"{a}.expand({a}.shape)",
        f"{a}.unsqueeze(1).expand(-1, 2, {', '.join(['-1'] * (x.dim() - 1))}).flatten(0, 1)",
        f"torch.broadcast_to({a}, (2, *{a}.shape))",
        f"{a}.rot90(1, (0, -1))",
        f"{a}.tile(2)",
    ]
    return one_of(w, forms)
