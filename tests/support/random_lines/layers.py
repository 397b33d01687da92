"""Norms, activations, gates and rotary embeddings, as modules and written out."""

from __future__ import annotations

from random_modules import Writer

from random_lines.making import axis, dtype_argument, is_float, like, line, of_rank


@line(2)
def norm(w: Writer) -> str:
    """Norms, as layers and written out, also over axes they are usually not taken over."""
    a = w.pick(lambda x: x.is_floating_point() and x.dim() > 0)
    x = w.tensor(a)
    n = x.shape[-1]
    dtype = dtype_argument(x)
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
    dtype = dtype_argument(x)
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
    dtype = dtype_argument(x)
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
