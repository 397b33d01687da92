"""What random modules are written of: lines of code, most of them careless. torch refuses those that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from random_modules import Writer
from torch import Tensor

Line = Callable[[Writer], "str | None"]
#: All of them, with how often they are taken.
LINES: list[tuple[Line, float]] = []


def line(weight: float = 1.0) -> Callable[[Line], Line]:
    """Adds a maker of lines."""

    def register(maker: Line) -> Line:
        LINES.append((maker, weight))
        return maker

    return register


def is_float(x: Tensor) -> bool:
    """Whether it holds floats."""
    return x.is_floating_point()


def of_rank(*ranks: int) -> Callable[[Tensor], bool]:
    """Floats with so many axes."""
    return lambda x: x.is_floating_point() and x.dim() in ranks


def integers(x: Tensor) -> bool:
    """Whether it holds indices."""
    return x.dtype in (torch.int64, torch.int32)


def like(w: Writer, name: str) -> Callable[[Tensor], bool]:
    """Whether it has the same sizes for both batches."""
    wanted = [one.shape for one in w.values[name]]
    return lambda x: x.shape == wanted[0] and x.dtype == w.tensor(name).dtype


def axis(w: Writer, x: Tensor) -> int:
    """An axis, counted from either end."""
    return w.rng.randrange(-x.dim(), x.dim()) if x.dim() else 0


def number(w: Writer) -> Any:
    """A number."""
    return w.rng.choice([0, 1, 2, -1, 0.5, 1.5, -0.25, 3, 1e-3, 0.1, -2.0])


@line(2)
def unary(w: Writer) -> str:
    """A function of each element."""
    kinds = [
        "torch.tanh",
        "torch.sigmoid",
        "torch.relu",
        "F.silu",
        "F.gelu",
        "torch.neg",
        "torch.abs",
        "torch.erf",
        "torch.sin",
        "torch.cos",
        "torch.exp",
        "torch.floor",
        "torch.ceil",
        "torch.round",
        "torch.sign",
        "F.softplus",
        "F.hardswish",
        "F.mish",
        "F.elu",
        "F.leaky_relu",
        "F.relu6",
        "torch.square",
        "torch.trunc",
        "torch.frac",
        "torch.log1p",
        "torch.expm1",
        "F.logsigmoid",
        "F.softsign",
        "torch.atan",
        "torch.sgn",
        "torch.isfinite",
        "torch.isinf",
        "torch.isnan",
        "torch.logical_not",
        "F.hardsigmoid",
        "F.selu",
        "torch.nan_to_num",
        "torch.positive",
        "torch.signbit",
        "F.tanhshrink",
    ]
    return f"{w.fresh()} = {w.rng.choice(kinds)}({w.pick()})"


@line()
def positive(w: Writer) -> str:
    """Functions of numbers above zero."""
    kind = w.rng.choice(["torch.log", "torch.sqrt", "torch.rsqrt", "torch.reciprocal", "torch.log2", "torch.log10"])
    return f"{w.fresh()} = {kind}({w.pick(is_float)}.abs() + 0.5)"


@line(3)
def binary(w: Writer) -> str:
    """A function of two tensors, which may be broadcast."""
    kind = w.rng.choice(
        [
            "+",
            "+",
            "+",
            "-",
            "-",
            "*",
            "*",
            "/",
            "torch.maximum",
            "torch.minimum",
            "torch.fmax",
            "torch.atan2",
            "torch.remainder",
            "torch.fmod",
            "torch.hypot",
            "torch.floor_divide",
            "torch.logaddexp",
        ]
    )
    a = w.pick()
    b = w.pick(like(w, a)) if w.rng.random() < 0.5 else w.pick()
    if kind in ("/", "torch.remainder", "torch.fmod", "torch.floor_divide"):
        b = f"({b}.abs() + 1)"
    return f"{w.fresh()} = {kind}({a}, {b})" if kind.startswith("torch") else f"{w.fresh()} = {a} {kind} {b}"


@line(2)
def with_number(w: Writer) -> str:
    """A function of a tensor and a number, on either side."""
    a, n = w.pick(), number(w)
    kind = w.rng.choice(["+", "-", "*", "/", "**", "//", "%"])
    if kind in ("/", "//", "%"):
        n = w.rng.choice([2, 3, 0.5, -2, 1.5])
    if kind == "**":
        return f"{w.fresh()} = {a} ** {w.rng.choice([2, 3, 1, 0, 2.0, 3.0])}"
    if w.rng.random() < 0.3 and kind in "+-*":
        return f"{w.fresh()} = {n} {kind} {a}"
    return f"{w.fresh()} = {a} {kind} {n}"


@line()
def with_alpha(w: Writer) -> str:
    """Sums with a factor; `addmm`, `lerp`, `addcmul`."""
    a = w.pick()
    b = w.pick(like(w, a))
    forms = [
        f"torch.add({a}, {b}, alpha={number(w)})",
        f"torch.sub({a}, {b}, alpha=2)",
        f"torch.rsub({a}, {b}, alpha=3)",
        f"torch.lerp({a}, {b}, 0.25)",
        f"torch.addcmul({a}, {b}, {a}, value=0.5)",
        f"torch.addcdiv({a}, {b}, {a}.abs() + 1)",
        f"torch.div({a}, {b}.abs() + 1, rounding_mode={w.rng.choice(['floor', 'trunc'])!r})",
    ]
    return f"{w.fresh()} = {w.rng.choice(forms)}"


@line(2)
def comparison(w: Writer) -> str:
    """Truth values."""
    a = w.pick()
    b = w.rng.choice([number(w), w.pick()])
    return f"{w.fresh()} = {a} {w.rng.choice(['<', '<=', '>', '>=', '==', '!='])} {b}"


@line()
def logic(w: Writer) -> str:
    """Functions of truth values and of bits."""
    a = w.pick(lambda x: not x.is_floating_point())
    b = w.pick(lambda x: not x.is_floating_point())
    forms = [f"{a} & {b}", f"{a} | {b}", f"{a} ^ {b}", f"~{a}", f"torch.logical_and({a}, {b})", f"{a} & 3"]
    return f"{w.fresh()} = {w.rng.choice(forms)}"


@line()
def clamp(w: Writer) -> str:
    """Between two bounds."""
    a = w.pick()
    forms = [
        f"{a}.clamp(-0.5, 0.75)",
        f"{a}.clamp(min=0)",
        f"{a}.clamp_max(1)",
        f"F.hardtanh({a})",
        f"{a}.clamp(1, -1)",
    ]
    return f"{w.fresh()} = {w.rng.choice(forms)}"


@line(1.5)
def where(w: Writer) -> str:
    """One of two elements."""
    mask = w.pick(lambda x: x.dtype == torch.bool)
    a = w.pick()
    b = w.pick(like(w, a))
    forms = [
        f"torch.where({mask}, {a}, {b})",
        f"torch.where({mask}, {a}, {number(w)})",
        f"torch.where({mask}, {number(w)}, {a})",
        f"{a}.masked_fill({mask}, {number(w)})",
        f"{a}.masked_fill({mask}[..., None], {number(w)})",
        f"{a} * {mask}[..., None]",
    ]
    return f"{w.fresh()} = {w.rng.choice(forms)}"


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
    return f"{w.fresh()} = {w.rng.choice(forms)}"


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
    return f"{w.fresh()} = {w.rng.choice(forms)}"


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
    return f"{w.fresh()} = {w.rng.choice(forms)}"


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
    return f"{w.fresh()} = {w.rng.choice(forms)}"


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
    return f"{w.fresh()} = {w.rng.choice(forms)}"


@line(2)
def reduced(w: Writer) -> str:
    """One number of many."""
    a = w.pick()
    x = w.tensor(a)
    d, keep = axis(w, x), w.rng.choice([True, False])
    kind = w.rng.choice(
        [
            "sum",
            "mean",
            "amax",
            "amin",
            "prod",
            "any",
            "all",
            "var",
            "std",
            "argmax",
            "argmin",
            "logsumexp",
            "norm",
            "median",
            "count_nonzero",
        ]
    )
    if kind in ("mean", "var", "std", "logsumexp", "norm", "prod"):
        a = w.pick(is_float)
        d = axis(w, w.tensor(a))
    forms = [f"{a}.{kind}()", f"{a}.{kind}({d})", f"{a}.{kind}({d}, keepdim={keep})"]
    if kind in ("sum", "mean", "amax", "amin", "var", "norm"):
        forms.append(f"{a}.{kind}(dim=(0, -1))")
    if kind in ("var", "std"):
        forms.append(f"{a}.{kind}({d}, correction=0)")
    form = w.rng.choice(forms)
    if kind == "median":
        form = f"{a}.median({d}).values"
    if kind == "count_nonzero":
        form = f"{a}.count_nonzero({d})"
    return f"{w.fresh()} = {form}"


@line()
def extremes(w: Writer) -> str:
    """Several results of one call."""
    a = w.pick(lambda x: x.dim() > 0 and x.dtype != torch.bool)
    x = w.tensor(a)
    d = axis(w, x)
    p, q = w.fresh(), w.fresh()
    forms = [
        f"{p}, {q} = {a}.max({d})",
        f"{p}, {q} = {a}.min({d}, keepdim=True)",
        f"{p}, {q} = torch.sort({a}, dim={d}, stable=True)",
        f"{p}, {q} = {a}.topk(1, {d})",
        f"{p}, {q} = torch.var_mean({a}, {d})",
        f"{p}, {q} = torch.std_mean({a})",
        f"{p}, {q} = {a}.cummax({d})",
        f"{p} = {a}.max({d})[1]",
        f"{p}, {q} = torch.aminmax({a}, dim={d})",
    ]
    return w.rng.choice(forms)


@line()
def running(w: Writer) -> str:
    """Running sums."""
    a = w.pick()
    d = axis(w, w.tensor(a))
    return f"{w.fresh()} = {a}.{w.rng.choice(['cumsum', 'cumprod', 'logcumsumexp'])}({d})"


@line(2)
def softmax(w: Writer) -> str:
    """Shares, also written out."""
    a = w.pick(is_float)
    d = axis(w, w.tensor(a))
    other = axis(w, w.tensor(a))
    v = w.fresh()
    forms = [
        f"{v} = {a}.softmax({d})",
        f"{v} = F.log_softmax({a}, {d})",
        f"{v} = {a}.softmax({d}, dtype=torch.float32)",
        f"{v} = {a}.float().softmax({d}).to({a}.dtype)",
        f"{v} = torch.exp({a} - {a}.amax({d}, keepdim=True))\n{v} = {v} / {v}.sum({d}, keepdim=True)",
        f"{v} = torch.exp({a} - {a}.max({d}, keepdim=True).values)\n{v} = {v} / {v}.sum({other}, keepdim=True)",
        f"{v} = torch.exp({a})\n{v} = {v} / {v}.sum({d}, keepdim=True)",
        f"{v} = F.softmin({a}, {d})",
    ]
    return w.rng.choice(forms)


@line(3)
def linear(w: Writer) -> str:
    """Layers, with weights that may be shared."""
    a = w.pick(lambda x: x.is_floating_point() and x.dim() > 0)
    x = w.tensor(a)
    n, m = x.shape[-1], w.rng.choice([x.shape[-1], 8, 4, 16, 1])
    dtype = f", dtype={x.dtype}" if x.dtype != torch.float32 else ""
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
    return f"{w.fresh()} = {w.rng.choice(forms)}"


@line(2)
def norm(w: Writer) -> str:
    """Norms, as layers and written out, also over axes they are usually not taken over."""
    a = w.pick(lambda x: x.is_floating_point() and x.dim() > 0)
    x = w.tensor(a)
    n = x.shape[-1]
    dtype = f", dtype={x.dtype}" if x.dtype != torch.float32 else ""
    v = w.fresh()
    d = w.rng.choice([-1, -1, -1, axis(w, x)])
    eps = w.rng.choice([1e-5, 1e-6, 0.1])
    weight = w.layer(f"nn.Parameter(torch.randn({n}{dtype}))")
    bias = w.layer(f"nn.Parameter(torch.randn({n}{dtype}))")
    forms = [
        f"{v} = {w.layer(f'nn.LayerNorm({n}, eps={eps}{dtype})')}({a})",
        f"{v} = F.layer_norm({a}, {tuple(x.shape[-2:])})" if x.dim() > 1 else f"{v} = F.layer_norm({a}, ({n},))",
        f"{v} = F.layer_norm({a}, ({n},), {weight})",
        f"{v} = {w.layer(f'nn.RMSNorm({n}, eps={eps}{dtype})')}({a})",
        f"{v} = {a} * torch.rsqrt({a}.pow(2).mean({d}, keepdim=True) + {eps}) * {weight}",
        f"{v} = {weight} * ({a}.float() * torch.rsqrt({a}.float().pow(2).mean({d}, True) + {eps})).to({a}.dtype)",
        f"{v} = ({a} - {a}.mean({d}, True)) / ({a}.var({d}, keepdim=True, unbiased=False) + {eps}).sqrt() * {weight} + {bias}",
        f"{v} = ({a} - {a}.mean({d}, True)) / ({a}.std({d}, keepdim=True) + {eps}) * {weight} + {bias}",
        f"{v} = {a} * torch.rsqrt({a}.pow(2).mean({d}, keepdim=True) + {eps}) * (1 + {weight})",
        f"{v} = F.normalize({a}, dim={d})",
        f"{v} = F.group_norm({a}.transpose(1, 2), 2)",
        f"{v} = {w.layer(f'nn.BatchNorm1d({n}{dtype})')}({a}.transpose(1, 2))",
        f"{v} = F.instance_norm({a})",
    ]
    return w.rng.choice(forms)


@line(2)
def sum_and_norm(w: Writer) -> str:
    """A residual and a norm of it; the sum is read twice, or not."""
    a = w.pick(of_rank(2, 3))
    x = w.tensor(a)
    n = x.shape[-1]
    dtype = f", dtype={x.dtype}" if x.dtype != torch.float32 else ""
    b = w.pick(like(w, a))
    s, v = w.fresh(), w.fresh()
    kind = w.rng.choice(["LayerNorm", "RMSNorm"])
    layer = w.layer(f"nn.{kind}({n}{dtype})")
    if w.rng.random() < 0.5:
        b = f"{w.layer(f'nn.Linear({n}, {n}{dtype})')}({b})"
    lines = f"{s} = {a} + {b}\n{v} = {layer}({s})"
    return lines + (f"\n{v} = {v} + {s}" if w.rng.random() < 0.5 else "")


@line(2)
def gelu(w: Writer) -> str:
    """GELU and its relatives written out, right and nearly right."""
    a, v = w.pick(is_float), w.fresh()
    b = w.pick(like(w, a)) if w.rng.random() < 0.2 else a
    half, one = w.rng.choice([0.5, 0.5, 0.5, 0.4]), w.rng.choice([1, 1.0, 1.0, 2.0])
    forms = [
        f"{v} = {half} * {a} * ({one} + torch.tanh(0.7978845608028654 * ({b} + 0.044715 * {b} ** 3)))",
        f"{v} = {half} * {a} * ({one} + torch.tanh(0.7978845608028654 * ({b} + 0.044715 * torch.pow({b}, 3.0))))",
        f"{v} = {a} * {half} * ({one} + torch.erf({b} / 1.4142135623730951))",
        f"{v} = {half} * {a} * ({one} + torch.erf({b} * 0.7071067811865476))",
        f"{v} = F.gelu({a}, approximate='tanh')",
        f"{v} = {a} * torch.sigmoid({b})",
        f"{v} = {a} * torch.sigmoid(1.702 * {b})",
        f"{v} = {a} / (1 + torch.exp(-{b}))",
        f"{v} = {a} * (1 + torch.erf({b} / 2 ** 0.5)) * 0.5",
        f"{v} = 0.5 * {a} * (1 + torch.tanh({b} * 0.7978845608 * (1 + 0.044715 * {b} * {b})))",
        f"{v} = {a} * torch.tanh(F.softplus({b}))",
    ]
    return w.rng.choice(forms)


@line(2)
def gated(w: Writer) -> str:
    """SwiGLU, GeGLU: a gate and what it is multiplied with, by two layers or by one."""
    a = w.pick(of_rank(2, 3))
    x = w.tensor(a)
    n = x.shape[-1]
    dtype = f", dtype={x.dtype}" if x.dtype != torch.float32 else ""
    v = w.fresh()
    kind = w.rng.choice(["F.silu", "F.gelu", "torch.relu", "torch.sigmoid", "torch.tanh"])
    bias = w.rng.choice([True, False])
    if w.rng.random() < 0.4:
        both = w.layer(f"nn.Linear({n}, {2 * n}, bias={bias}{dtype})")
        p, q = w.fresh(), w.fresh()
        swap = w.rng.random() < 0.3
        return f"{p}, {q} = {both}({a}).chunk(2, -1)\n{v} = {kind}({q if swap else p}) * {p if swap else q}"
    gate, up = (w.layer(f"nn.Linear({n}, 16, bias={bias}{dtype})") for _ in range(2))
    down = w.layer(f"nn.Linear(16, {n}, bias={bias}{dtype})")
    forms = [
        f"{v} = {kind}({gate}({a})) * {up}({a})",
        f"{v} = {down}({kind}({gate}({a})) * {up}({a}))",
        f"{v} = {down}({up}({a}) * {kind}({gate}({a})))",
        f"{v} = F.glu({gate}({a}), -1)",
    ]
    return w.rng.choice(forms)


@line(2)
def rope(w: Writer) -> str:
    """Rotary embeddings in both conventions, right and nearly right."""
    a = w.pick(lambda x: x.is_floating_point() and x.dim() in (3, 4) and x.shape[-1] % 2 == 0)
    x = w.tensor(a)
    n = x.shape[-1]
    c, v = w.fresh(), w.fresh()
    angles = f"{c} = torch.arange({a}.shape[-2], dtype={x.dtype})[:, None] * 0.1 * torch.arange({n // 2}, dtype={x.dtype})[None]"
    forms = [
        (
            f"{c} = torch.cat([{c}, {c}], -1)\n"
            f"{v} = {a} * {c}.cos() + torch.cat([-{a}[..., {n // 2}:], {a}[..., :{n // 2}]], -1) * {c}.sin()"
        ),
        (
            f"{v} = torch.cat([{a}[..., :{n // 2}] * {c}.cos() - {a}[..., {n // 2}:] * {c}.sin(), "
            f"{a}[..., :{n // 2}] * {c}.sin() + {a}[..., {n // 2}:] * {c}.cos()], -1)"
        ),
        (
            f"{v} = torch.stack([{a}[..., 0::2] * {c}.cos() - {a}[..., 1::2] * {c}.sin(), "
            f"{a}[..., 0::2] * {c}.sin() + {a}[..., 1::2] * {c}.cos()], -1).flatten(-2)"
        ),
        (
            f"{c} = {c}.repeat_interleave(2, -1)\n"
            f"{v} = {a} * {c}.cos() + torch.stack([-{a}[..., 1::2], {a}[..., 0::2]], -1).flatten(-2) * {c}.sin()"
        ),
        (
            f"{c} = torch.cat([{c}, {c}], -1)\n"
            f"{v} = {a} * {c}.cos() + torch.cat([{a}[..., {n // 2}:], -{a}[..., :{n // 2}]], -1) * {c}.sin()"
        ),
        (
            f"{c} = torch.cat([{c}, {c} * 2], -1)\n"
            f"{v} = {a} * {c}.cos() + torch.cat([-{a}[..., {n // 2}:], {a}[..., :{n // 2}]], -1) * {c}.sin()"
        ),
    ]
    return f"{angles}\n{w.rng.choice(forms)}"


def _mask(w: Writer, q: str, k: str, scores: str) -> tuple[str, str, str]:
    """Lines that make a mask, the scores with it, and it as an argument of torch's attention."""
    m = w.fresh()
    i, j = f"torch.arange({q}.shape[-2])[:, None]", f"torch.arange({k}.shape[-2])[None]"
    rows, columns = f"{q}.shape[-2]", f"{k}.shape[-2]"
    kept = [
        f"{m} = torch.ones({rows}, {columns}, dtype=torch.bool).tril()",
        f"{m} = torch.ones({rows}, {columns}, dtype=torch.bool).tril({w.rng.choice([1, -1, 2])})",
        f"{m} = torch.ones({rows}, {columns}, dtype=torch.bool).tril({columns} - {rows})",
        f"{m} = {i} >= {j}",
        f"{m} = {i} > {j} - 1",
        f"{m} = {j} <= {i} + ({columns} - {rows})",
        f"{m} = ({i} >= {j}) & ({i} - {j} < 3)",
        f"{m} = torch.triu(torch.ones({rows}, {columns}), 1) == 0",
        f"{m} = {scores} > -0.3" if scores.startswith("v") else f"{m} = {i} != {j} + 1",
    ]
    out = w.rng.choice(["float('-inf')", "float('-inf')", "-1e9", f"torch.finfo({q}.dtype).min", "-2.0"])
    form = w.rng.randrange(4)
    if form == 0:
        return w.rng.choice(kept), f"{scores}.masked_fill(~{m}, {out})", m
    if form == 1:
        return w.rng.choice(kept), f"torch.where({m}, {scores}, {out})", m
    if form == 2:
        lines = w.rng.choice(kept) + f"\n{m} = torch.where({m}, 0.0, {out}).to({q}.dtype)"
        return lines, f"{scores} + {m}", m
    lines = f"{m} = torch.full(({rows}, {columns}), {out}, dtype={q}.dtype).triu({w.rng.choice([1, 1, 0, 2])})"
    return lines, f"{scores} + {m}", m


@line(4)
def attention(w: Writer) -> str:
    """Attention: torch's function, or written out; heads that are split, shared, repeated; masks of every kind."""
    a = w.pick(of_rank(3))
    x = w.tensor(a)
    n = x.shape[-1]
    if n % 4:
        raise LookupError
    dtype = f", dtype={x.dtype}" if x.dtype != torch.float32 else ""
    heads = w.rng.choice([1, 2, 4])
    shared = w.rng.choice([heads, heads, heads, max(heads // 2, 1), 1])
    width = n // 4 * w.rng.choice([1, 2])
    q, k, v, out = (w.fresh() for _ in range(4))
    layers = [w.layer(f"nn.Linear({n}, {h * width}{dtype})") for h in (heads, shared, shared)]
    names = (q, k, v)
    source = (a, a, a) if w.rng.random() < 0.8 else (a, *[w.pick(like(w, a))] * 2)
    past = w.rng.random() < 0.15
    lines = []
    for name, layer, h, of in zip(names, layers, (heads, shared, shared), source, strict=True):
        split = f"{layer}({of}).view({of}.shape[0], {of}.shape[1], {h}, {width}).transpose(1, 2)"
        lines.append(f"{name} = {split}")
    if past:
        lines[1:] = [
            *lines[1:],
            f"{k} = torch.cat([{k}[:, :, :1] * 0.5, {k}], 2)",
            f"{v} = torch.cat([{v}[:, :, :1], {v}], 2)",
        ]
    if heads != shared:
        how = w.rng.choice(["gqa", "interleave", "expand", "repeat"])
        times = heads // shared
        if how == "interleave":
            lines += [f"{one} = {one}.repeat_interleave({times}, 1)" for one in (k, v)]
        elif how == "expand":
            lines += [
                f"{one} = {one}[:, :, None].expand(-1, -1, {times}, -1, -1).reshape({one}.shape[0], {heads}, {one}.shape[2], {width})"
                for one in (k, v)
            ]
        elif how == "repeat":
            lines += [f"{one} = {one}.repeat(1, {times}, 1, 1)" for one in (k, v)]
        gqa = how == "gqa"
    else:
        gqa = False
    scale = w.rng.choice([width**-0.5, 0.5, 1.0, 0.125])
    if gqa or w.rng.random() < 0.4:
        options = []
        choice = w.rng.randrange(4)
        if choice == 0:
            options.append("is_causal=True")
        elif choice < 3:
            made, _, mask = _mask(w, q, k, "scores")
            lines.extend(made.splitlines())
            options.append(f"attn_mask={mask}")
        if w.rng.random() < 0.3:
            options.append(f"scale={scale}")
        if gqa:
            options.append("enable_gqa=True")
        lines.append(f"{out} = F.scaled_dot_product_attention({', '.join([q, k, v, *options])})")
    else:
        s = w.fresh()
        scaled = w.rng.choice(
            [
                f"{q} @ {k}.transpose(-2, -1) * {scale}",
                f"({q} * {scale}) @ {k}.transpose(-2, -1)",
                f"{q} @ {k}.transpose(-2, -1) / {1 / scale}",
                f"{q} @ ({k} * {scale}).mT",
                f"torch.matmul({q}, {k}.mT)",
                f"torch.einsum('bhid,bhjd->bhij', {q}, {k}) * {scale}",
            ]
        )
        lines.append(f"{s} = {scaled}")
        if w.rng.random() < 0.15:
            lines.append(f"{s} = 5.0 * torch.tanh({s} / 5.0)")
        if w.rng.random() < 0.7:
            made, masked, _ = _mask(w, q, k, s)
            lines.extend([*made.splitlines(), f"{s} = {masked}"])
        p = w.rng.choice(
            [
                f"{s}.softmax(-1)",
                f"{s}.softmax(-1)",
                f"F.softmax({s}, dim=-1, dtype=torch.float32).to({q}.dtype)",
                f"(({s} - {s}.amax(-1, True)).exp() / ({s} - {s}.amax(-1, True)).exp().sum(-1, True))",
                f"{s}.softmax(-2)",
            ]
        )
        lines.append(f"{s} = {p}")
        lines.append(f"{out} = {w.rng.choice([f'{s} @ {v}', f'torch.matmul({s}, {v})'])}")
        if w.rng.random() < 0.1:
            lines.append(f"{out} = {out} + {s}.sum()")
    if w.rng.random() < 0.8:
        lines.append(f"{out} = {out}.transpose(1, 2).reshape({a}.shape[0], {a}.shape[1], {heads * width})")
        if w.rng.random() < 0.5:
            lines.append(f"{out} = {a} + {w.layer(f'nn.Linear({heads * width}, {n}{dtype})')}({out})")
    return "\n".join(lines)


@line()
def packed_attention(w: Writer) -> str:
    """Attention with one layer for queries, keys and values."""
    a = w.pick(of_rank(3))
    x = w.tensor(a)
    n = x.shape[-1]
    dtype = f", dtype={x.dtype}" if x.dtype != torch.float32 else ""
    q, k, v, out = (w.fresh() for _ in range(4))
    layer = w.layer(f"nn.Linear({n}, {3 * n}{dtype})")
    causal = w.rng.choice([True, False])
    size = f"{a}.shape[0], {a}.shape[1]"
    forms = [
        f"{q}, {k}, {v} = {layer}({a}).view({size}, 3, 2, {n // 2}).permute(2, 0, 3, 1, 4)",
        f"{q}, {k}, {v} = {layer}({a}).view({size}, 3, 2, {n // 2}).permute(2, 0, 3, 1, 4).unbind(0)",
        f"{q}, {k}, {v} = (part.view({size}, 2, {n // 2}).transpose(1, 2) for part in {layer}({a}).chunk(3, -1))",
        f"{q}, {k}, {v} = (part.view({size}, 2, {n // 2}).transpose(1, 2) for part in {layer}({a}).split({n}, 2))",
    ]
    return (
        f"{w.rng.choice(forms)}\n{out} = F.scaled_dot_product_attention({q}, {k}, {v}, is_causal={causal})\n"
        f"{out} = {out}.transpose(1, 2).flatten(2)"
    )


@line()
def block(w: Writer) -> str:
    """Layers of torch.nn that hold several."""
    a = w.pick(of_rank(3))
    n = w.tensor(a).shape[-1]
    heads = w.rng.choice([1, 2])
    first = w.rng.choice([True, False])
    relu = w.rng.choice(["relu", "gelu"])
    forms = [
        f"nn.TransformerEncoderLayer({n}, {heads}, 16, batch_first=True, norm_first={first}, activation={relu!r})",
        f"nn.Sequential(nn.Linear({n}, 16), nn.GELU(), nn.Linear(16, {n}), nn.Dropout(0.1))",
    ]
    if w.rng.random() < 0.3:
        layer = w.layer(f"nn.MultiheadAttention({n}, {heads}, batch_first=True)")
        return f"{w.fresh()} = {layer}({a}, {a}, {a}, need_weights={first})[0]"
    return f"{w.fresh()} = {w.layer(w.rng.choice(forms))}({a})"


@line(1.5)
def convolution(w: Writer) -> str:
    """Convolutions and pools over one axis and over two."""
    a = w.pick(of_rank(3, 4))
    x = w.tensor(a)
    dtype = f", dtype={x.dtype}" if x.dtype != torch.float32 else ""
    v = w.fresh()
    kernel, stride, padding = w.rng.choice([1, 2, 3]), w.rng.choice([1, 1, 2]), w.rng.choice([0, 1])
    if x.dim() == 4:
        channels = x.shape[1]
        groups = w.rng.choice([1, channels])
        conv = f"nn.Conv2d({channels}, {2 * channels}, {kernel}, stride={stride}, padding={padding}, groups={groups}{dtype})"
        forms = [
            f"{w.layer(conv)}({a})",
            f"F.max_pool2d({a}, 2, {stride}, padding={padding})",
            f"F.avg_pool2d({a}, 2, padding={padding}, count_include_pad={w.rng.choice([True, False])})",
            f"F.adaptive_avg_pool2d({a}, 1)",
            f"F.interpolate({a}, scale_factor=2, mode='nearest')",
            f"F.pixel_unshuffle({a}, 1)",
            f"F.conv2d({a}, {a}[:1, :, :1, :1])",
        ]
    else:
        channels = x.shape[2]
        groups = w.rng.choice([1, 1, 2, channels])
        conv = (
            f"nn.Conv1d({channels}, {2 * channels}, {kernel}, stride={stride}, padding={padding}, groups={groups}, "
            f"dilation={w.rng.choice([1, 1, 2])}, bias={w.rng.choice([True, False])}{dtype})"
        )
        forms = [
            f"{w.layer(conv)}({a}.transpose(1, 2))",
            f"F.relu({w.layer(conv)}({a}.mT)).mT",
            f"F.max_pool1d({a}, 2)",
            f"F.avg_pool1d({a}, 2, ceil_mode=True)",
            f"F.adaptive_avg_pool1d({a}, 2)",
            f"F.conv1d(F.pad({a}.mT, (2, 0)), {w.layer(f'nn.Parameter(torch.randn({channels}, 1, 3{dtype}))')}, groups={channels})",
        ]
    return f"{v} = {w.rng.choice(forms)}"


@line(1.5)
def indexed(w: Writer) -> str:
    """Elements by tensors of indices."""
    a = w.pick(lambda x: x.dim() > 0)
    x = w.tensor(a)
    ids = w.pick(integers)
    d = axis(w, x)
    v = w.fresh()
    table = w.layer(f"nn.Embedding(7, {w.rng.choice([4, 8])})")
    forms = [
        f"{v} = {table}({ids})",
        f"{v} = {table}({ids} % 7)",
        f"{v} = {table}.weight[{ids} % 7]",
        f"{v} = F.embedding({ids} % 7, {table}.weight, padding_idx=0)",
        f"{v} = {a}[{ids} % {a}.shape[0]]",
        f"{v} = {a}[..., {ids}.flatten() % {a}.shape[-1]]",
        f"{v} = {a}[:, {ids} % {a}.shape[1]]",
        f"{v} = {a}[torch.arange({a}.shape[0]), {ids}.flatten()[:1] % {a}.shape[1]]",
        f"{v} = {a}[:, -1]",
        f"{v} = {a}.index_select({d}, {ids}.flatten() % {a}.shape[{d}])",
        f"{v} = {a}.gather({d}, torch.zeros_like({a}, dtype=torch.int64))",
        f"{v} = {a}.gather({d}, {a}.argsort({d}, stable=True))",
        f"{v} = {a}.take_along_dim({a}.argmax({d}, keepdim=True), {d})",
        f"{v} = {a}[torch.arange({a}.shape[0])[:, None], {ids} % {a}.shape[1]]",
        f"{v} = {a}[-1, {ids}.flatten()[0] % {a}.shape[1]]",
        f"{v} = F.one_hot({ids} % 5, 5)",
        f"{v} = {a}.index_select({d}, torch.tensor([0, 0]))",
    ]
    return w.rng.choice(forms)


@line()
def scattered(w: Writer) -> str:
    """Elements replaced by tensors of indices."""
    a = w.pick(lambda x: x.dim() > 0)
    x = w.tensor(a)
    d = axis(w, x)
    v = w.fresh()
    forms = [
        f"{v} = {a}.index_copy({d}, torch.tensor([0]), {a}.narrow({d}, -1, 1))",
        f"{v} = {a}.index_add({d}, torch.tensor([0, 0]), {a}.narrow({d}, 0, 2))",
        f"{v} = {a}.index_fill({d}, torch.tensor([0]), 1)",
        f"{v} = {a}.index_put((torch.tensor([0]),), {a}[-1:])",
        f"{v} = {a}.index_put((torch.tensor([0, 0]),), {a}[-1:], accumulate=True)",
        f"{v} = {a}.scatter({d}, torch.zeros_like({a}, dtype=torch.int64), {a})"
        if x.dim() and x.shape[d] == 1
        else f"{v} = {a}.scatter({d}, {a}.argsort({d}, stable=True), {a})",
        f"{v} = torch.slice_scatter({a}, {a}.narrow({d}, 0, 1) * 2, {d}, 0, 1)",
        f"{v} = torch.select_scatter({a}, {a}.select({d}, 0), {d}, -1)",
        f"{v} = {a}.scatter_add({d}, torch.zeros_like({a}, dtype=torch.int64), {a})",
    ]
    return w.rng.choice(forms)


@line(1.5)
def in_place(w: Writer) -> str:
    """Tensors that are changed where they lie: copies, views of copies."""
    a = w.pick(lambda x: x.dim() > 0)
    b = w.pick(like(w, a))
    x = w.tensor(a)
    v = w.fresh()
    forms = [
        f"{v} = {a}.clone()\n{v}.add_({b})",
        f"{v} = {a}.clone()\n{v}[:1] = {b}[:1]",
        f"{v} = {a}.clone()\n{v}[..., ::2] *= 2",
        f"{v} = {a}.clone()\n{v}[..., -1] = 0",
        f"{v} = {a}.clone()\n{v}.transpose(0, -1)[0] += 1",
        f"{v} = {a} * 1\n{v}.view(-1)[1:3].zero_()",
        f"{v} = torch.zeros_like({a})\n{v}.copy_({b})\n{v}.mul_(2)",
        f"{v} = {a} + 0\n{v}.masked_fill_({v} > 0, 0)",
        f"{v} = {a}.clone()\n{v}.narrow({axis(w, x)}, 0, 1).fill_(1)",
        f"{v} = {a}.clone()\n{v}.unsqueeze_(0)\n{v} = {v}.neg_()",
        f"{v} = {a}.clone()\n{v}[torch.tensor([0])] = {b}[-1:]",
        f"{v} = {a}.clone()\n{v}.clamp_(min=0).add_({a})",
        f"{v} = {a}.clone()\n{v}[..., 0], {v}[..., -1] = {b}[..., -1], {b}[..., 0]",
        f"{v} = {a} * 2\n{v}.relu_()",
        f"{v} = torch.zeros({a}.shape, dtype={a}.dtype)\n{v}[..., 1:] = {a}[..., :-1]",
    ]
    return w.rng.choice(forms)


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
    return f"{w.fresh()} = {w.rng.choice(forms)}"


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
