"""Sums, extremes and softmax along axes."""

from __future__ import annotations

import torch
from random_modules import Writer

from random_lines.making import axis, is_float, line


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
