"""Functions of elements: numbers, comparisons, truth values, choices."""

from __future__ import annotations

import torch
from random_modules import Writer

from random_lines.making import is_float, like, line, number, one_of


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
    return one_of(w, forms)


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
    return one_of(w, forms)


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
    return one_of(w, forms)


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
    return one_of(w, forms)
