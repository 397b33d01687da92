"""Elements by their indices, and writes into tensors."""

from __future__ import annotations

from random_modules import Writer

from random_lines.making import axis, integers, like, line


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
