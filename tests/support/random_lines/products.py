"""Linear layers and products of matrices."""

from __future__ import annotations

from random_modules import Writer

from random_lines.making import dtype_argument, line, one_of


@line(3)
def linear(w: Writer) -> str:
    """Layers, with weights that may be shared."""
    a = w.pick(lambda x: x.is_floating_point() and x.dim() > 0)
    x = w.tensor(a)
    n, m = x.shape[-1], w.rng.choice([x.shape[-1], 8, 4, 16, 1])
    dtype = dtype_argument(x)
    v = w.fresh()
    form = w.rng.choice(["layer", "layer", "activated", "weight", "addmm", "einsum", "bias", "residual", "bilinear"])
    if form == "addmm":
        weight, bias = (
            w.layer(f"nn.Parameter(torch.randn({n}, {m}{dtype}) * 0.3)"),
            w.layer(f"nn.Parameter(torch.randn({m}{dtype}))"),
        )
        return f"{v} = torch.addmm({bias}, {a}.reshape(-1, {n}), {weight}, beta={w.rng.choice([1, 0.5, 0])}, alpha={w.rng.choice([1, 2])})"
    if form == "weight":
        weight = w.layer(f"nn.Parameter(torch.randn({m}, {n}{dtype}) * 0.3)")
        return f"{v} = {a} @ {weight}.t()" if w.rng.random() < 0.5 else f"{v} = {weight} @ {a}[..., None]"
    if form == "einsum":
        weight = w.layer(f"nn.Parameter(torch.randn({n}, {m}{dtype}) * 0.3)")
        return f"{v} = torch.einsum('...d,de->...e', {a}, {weight})"
    layer = w.layer(f"nn.Linear({n}, {m}, bias={w.rng.choice([True, True, False])}{dtype})")
    if form == "activated":
        kind = w.rng.choice(["F.gelu", "F.relu", "F.silu", "torch.tanh", "torch.sigmoid", "F.relu6", "F.leaky_relu"])
        return f"{v} = {kind}({layer}({a}))"
    if form == "bias":
        bias = w.layer(f"nn.Parameter(torch.randn({w.rng.choice([m, 1])}{dtype}))")
        return f"{v} = {layer}({a}) {w.rng.choice('+-*')} {bias}"
    if form == "residual":
        layer = w.layer(f"nn.Linear({n}, {n}{dtype})")
        return f"{v} = {a} {w.rng.choice('+-')} {layer}({a})"
    return f"{v} = {layer}({a})"


@line(2.5)
def product(w: Writer) -> str:
    """Products of matrices."""
    a = w.pick(lambda x: x.is_floating_point() and x.dim() > 0)
    b = w.pick(lambda x: x.is_floating_point() and x.dim() > 0)
    scale = w.rng.choice(["", "", " * 0.25", " / 4", " / 2.0"])
    forms = [
        f"{a} @ {b}",
        f"{a} @ {b}.transpose(-1, -2)",
        f"{a} @ {b}.mT{scale}",
        f"({a} * 0.5) @ {b}.mT",
        f"{a}.mT @ {b}{scale}",
        f"{a}.mT @ {b} / 3",
        f"torch.matmul({a}, {a}.mT){scale}",
        f"torch.einsum('bij,bkj->bik', {a}, {b})",
        f"torch.einsum('bhid,bhjd->bhij', {a}, {b}){scale}",
        f"torch.bmm({a}, {b}.mT)",
        f"torch.baddbmm({a}, {a}, {b}, beta=0.5)",
        f"torch.outer({a}, {b})",
        f"{a} @ {b}.transpose(1, 2)",
    ]
    return one_of(w, forms)
