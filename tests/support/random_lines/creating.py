"""Conversions, new tensors, margins, and lines that cancel out."""

from __future__ import annotations

from random_modules import Writer

from random_lines.making import line, one_of


@line(1.5)
def cast(w: Writer) -> str:
    """Another type."""
    a = w.pick()
    kinds = [
        "float()", "double()", "long()", "int()", "bool()", "half()", "bfloat16()", "to(torch.uint8)", "to(torch.int16)",
        "to(torch.float32).to(torch.bfloat16)", "type(torch.float32)", "to(torch.int8)",
    ]  # fmt: skip
    weights = [5, 2, 3, 1, 2, 1, 1, 1, 1, 1, 2, 1]
    return f"{w.fresh()} = {a}.{w.rng.choices(kinds, weights=weights, k=1)[0]}"


@line()
def created(w: Writer) -> str:
    """Tensors out of nothing, or out of sizes."""
    a = w.pick()
    v = w.fresh()
    forms = [
        f"{v} = torch.arange(S)",
        f"{v} = torch.arange(S, dtype=torch.float32) / S",
        f"{v} = torch.arange(0, 1, 0.25)",
        f"{v} = torch.arange(S, 0, -1)",
        f"{v} = torch.zeros(B, S)",
        f"{v} = torch.full((B, 1), 2.5)",
        f"{v} = torch.ones_like({a})",
        f"{v} = torch.eye(4)",
        f"{v} = {a}.new_zeros(2, 3)",
        f"{v} = torch.linspace(0, 1, 5)",
        f"{v} = torch.full_like({a}, 3)",
        f"{v} = torch.tensor([1.0, -2.0, 0.5, 4.0])",
        f"{v} = torch.tensor(3)",
        f"{v} = torch.tril(torch.ones(S, S))",
        f"{v} = torch.arange(B)[:, None] * S + torch.arange(S)",
        f"{v} = {a} * S",
        f"{v} = {a} + {a}.shape[-1]",
        f"{v} = {a} / {a}.shape[0]",
        f"{v} = torch.tensor([]).reshape(0, 4)",
        f"{v} = torch.meshgrid(torch.arange(S), torch.arange(3), indexing='ij')[0]",
    ]
    return w.rng.choice(forms)


@line()
def padded(w: Writer) -> str:
    """Numbers around, triangles, distances between."""
    a = w.pick(lambda x: x.dim() > 0)
    x = w.tensor(a)
    forms = [
        f"F.pad({a}, (1, 2))",
        f"F.pad({a}, (-1, 1))",
        f"F.pad({a}, (0, 1, 2, 0), value=1.5)",
        f"F.pad({a}, (1, 1), mode='circular')",
        f"F.pad({a}, (1, 1), mode='replicate')",
        f"F.pad({a}, (1, 1), mode='reflect')",
        f"{a}.tril()",
        f"{a}.triu({w.rng.choice([1, -1, 2])})",
        f"F.pad({a}, (0, 0, 1, -1))",
        f"{a}.trace()" if x.dim() == 2 else f"{a}.tril(-1)",
        f"torch.cdist({a}, {a})",
        f"F.cosine_similarity({a}, {a} + 1, dim=-1)",
    ]
    return one_of(w, forms)


@line(0.5)
def twice(w: Writer) -> str:
    """The same once more, or something that cancels out."""
    a = w.pick()
    v, u = w.fresh(), w.fresh()
    forms = [
        f"{v} = torch.tanh({a})\n{u} = torch.tanh({a}) + {v}",
        f"{v} = {a}.mT.mT" if w.tensor(a).dim() > 1 else f"{v} = {a} + 0",
        f"{v} = -(-{a})",
        f"{v} = {a} * 1 + 0",
        f"{v} = {a} - {a}",
        f"{v} = {a}.to(torch.float64).to({a}.dtype)",
        f"{v} = {a}.reshape(-1).reshape({a}.shape)",
        f"{v} = ({a} * 2) * 3\n{v} = {v} / 6",
        f"{v} = {a} / 1",
        f"{v} = {a} * 0",
        f"{v} = {a} ** 1",
        f"{v} = {a}.flip(0).flip(0)",
        f"{v} = {a}.float().half().float()",
    ]
    return w.rng.choice(forms)
