"""Attention and whole blocks, in the forms people write."""

from __future__ import annotations

from random_modules import Writer

from random_lines.making import dtype_argument, like, line, of_rank


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
    dtype = dtype_argument(x)
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
    dtype = dtype_argument(x)
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
