"""Each handler of the exporter: the graph gives what torch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exported_graphs import Function, assert_graph_is, export, operations, run
from hypothesis import given, settings
from hypothesis import strategies as st
from layerzero.errors import ExportError
from layerzero.export.handlers import HANDLERS
from torch import Tensor
from torch.export import Dim


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of a fixed seed."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def ints(*shape: int, below: int = 5) -> Tensor:
    """Indices of a fixed seed."""
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(sum(shape)))


X, Y, POSITIVE = randn(2, 3, 4), randn(3, 1), randn(2, 3, 4).abs() + 0.1
MASK = torch.tensor([[True, False, True, True], [False, False, True, False], [True, True, True, True]])
Q, K, V = randn(2, 4, 5, 8), randn(2, 2, 6, 8), randn(2, 2, 6, 3)

UNARY: list[Callable[..., Any]] = [
    *(torch.abs, torch.ceil, torch.cos, torch.erf, torch.exp, torch.floor, torch.neg, torch.relu, torch.round),
    *(torch.sgn, torch.sigmoid, torch.sign, torch.sin, torch.tanh, F.silu, F.gelu, torch.reciprocal, torch.isnan),
    lambda x: F.gelu(x, approximate="tanh"),
    *(F.leaky_relu, F.hardtanh, F.hardswish, F.softplus, F.elu, F.mish, F.relu6, F.hardsigmoid, F.glu),
    *(torch.log, torch.sqrt, torch.rsqrt),
]
BINARY: list[Callable[..., Any]] = [
    *(torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.remainder),
    *(torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge, torch.rsub),
    lambda x, y: torch.add(x, y, alpha=2),
    lambda x, y: torch.sub(x, y, alpha=3),
    lambda x, y: torch.div(x, y, rounding_mode="floor"),
    lambda x, y: torch.logical_and(x > 0, y > 0) | torch.logical_xor(x > 1, y < 1),
]
ONE: dict[str, Callable[[Tensor], Any]] = {
    "scalars": lambda x: torch.sub(x, x * x, alpha=0.3) + (x + 1) * 2.5 - 3 / (1 + x * x) + (2 - x),
    "pow": lambda x: (x**2, x**3, 2.0**x, x.abs() ** 0.5),
    "promotion": lambda x: (x + x.to(torch.float64), x.long() + x, x.long() / 2, (x > 0) + 1, x.int() * 2.5),
    "compare": lambda x: (x == 0, x.long() > 0.5, x.isnan(), 1 < x),
    "bits": lambda x: (x.long() & 3, x.long() | 1, ~x.long(), (x > 0) ^ (x > 1), ~(x > 0), x.logical_not()),
    "clamp": lambda x: (x.clamp(-0.5, 0.5), x.clamp(min=0), x.clamp_max(0.2), x.long().clamp(0, 1)),
    "where": lambda x: (torch.where(x > 0, x, 0.0), torch.where(x > 0, 1, x), x.masked_fill(x < 0, float("-inf"))),
    "views": lambda x: (
        x.view(6, 4),
        x.reshape(-1),
        x.flatten(1),
        x.unsqueeze(-1),
        x[:1].squeeze(0),
        x.unflatten(2, (2, 2)),
    ),
    "axes": lambda x: (x.permute(2, 0, 1), x.transpose(-1, 0), x[0].t(), x.mT, x.movedim(0, 1)),
    "slices": lambda x: (x[:, 1:], x[..., ::2], x[1, :, -1], x[:, -2:-1], x[0:0], x.narrow(2, 1, 2), x[..., None, 0]),
    "splits": lambda x: (*x.split(2, -1), *x.split([1, 2], 1), *x.chunk(2, 2), *x.unbind(1)),
    "split_one": lambda x: x.split(1, -1)[2],
    "joins": lambda x: (torch.cat([x, x + 1], 1), torch.stack([x, x], -1), torch.cat([x, x.double()], 0)),
    "repeats": lambda x: (
        x.repeat(2, 1, 3),
        x[:1].expand(5, -1, -1),
        x.repeat_interleave(2, 1),
        x.flip(0, 2),
        x.roll(1, 2),
    ),
    "pads": lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, -1, 2, 0), value=9.0), F.pad(x, (1, 0), value=float("-inf"))),
    "triangles": lambda x: (x.tril(), x.triu(1), x.tril(-1)),
    "sums": lambda x: (x.sum(), x.sum(1), x.sum((0, 2), keepdim=True), (x > 0).sum(), x.mean(-1), x.mean(), x.prod(1)),
    "extremes": lambda x: (
        x.amax(1),
        x.amin((0, 1), True),
        x.max(),
        x.min(-1),
        x.max(0, keepdim=True),
        x.max(1).values,
    ),
    "truths": lambda x: ((x > 1).any(), (x > -9).all(1), (x > 0).any(-1, True)),
    "places": lambda x: (x.argmax(), x.argmax(1), x.argmin(-1, keepdim=True)),
    "cumsum": lambda x: (x.cumsum(1), (x > 0).cumsum(-1)),
    "moments": lambda x: (x.var(1), x.std((0, 1), correction=0), torch.var_mean(x, -1), x.norm(dim=-1), x.norm(p=1)),
    "softmax": lambda x: (x.softmax(-1), x.softmax(0), F.log_softmax(x, 1), x.softmax(1, dtype=torch.float64)),
    "logsumexp": lambda x: x.logsumexp(-1),
    "casts": lambda x: (
        x.to(torch.float16),
        x.long(),
        x.bool(),
        x.type(torch.float64),
        x.clone().detach().contiguous(),
    ),
    "norms": lambda x: (
        F.layer_norm(x, (4,)),
        F.layer_norm(x, (3, 4), eps=0.1),
        F.group_norm(x, 3),
        F.rms_norm(x, (4,)),
    ),
    "creation": lambda x: (
        torch.zeros_like(x),
        x.new_ones(2),
        torch.full((2, 3), 7),
        torch.full_like(x, float("-inf")),
    ),
    "ranges": lambda x: (
        torch.arange(5),
        torch.arange(2, 9, 3),
        torch.arange(0, 1, 0.25),
        torch.arange(3.0),
        torch.arange(5, 0, -2),
    ),
    "in_place": lambda x: x.clone().add_(1).mul_(2).masked_fill_(x > 0, 0),
    "copied_into": lambda x: _copied_into(x),
    "scatter": lambda x: (torch.slice_scatter(x, x[:, :1] * 9, 1, 1, 2), torch.select_scatter(x, x[0] * 9, 0, 1)),
    "einsum": lambda x: torch.einsum("bik,bjk->bij", x, x),
    "eye": lambda x: torch.eye(3, 4) * x,
    "vectors": lambda x: (x[0, 0] @ x[1, 0], x @ x[0, 0], x[0, 0] @ x.mT),
}


def _copied_into(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1] = 5.0
    y[:, :, 1:3] = x[:, :, :2]
    return y


@pytest.mark.parametrize("function", UNARY)
def test_functions_of_one_element(function: Callable[..., Any]) -> None:
    """Over the range they are defined for."""
    exported = assert_graph_is(function, [POSITIVE if function in (torch.log, torch.sqrt, torch.rsqrt) else X])
    assert exported.hosts in ([], ["aten.log1p.default"], ["aten.expm1.default"], ["aten.elu.default"])


@pytest.mark.parametrize("function", BINARY)
def test_functions_of_two_elements(function: Callable[..., Any]) -> None:
    """Sizes are broadcast; integers and floats meet in the type torch gives."""
    assert not assert_graph_is(function, [X, Y]).hosts
    if function is not torch.div:
        assert not assert_graph_is(function, [ints(2, 3) + 1, ints(3) + 1]).hosts


@pytest.mark.parametrize("name", ONE)
def test_an_op_gives_what_torch_gives(name: str) -> None:
    """In float32, without a call that stays torch's."""
    assert assert_graph_is(ONE[name], [X]).hosts == []


@pytest.mark.parametrize("name", ["scalars", "softmax", "norms", "sums"])
def test_halves(name: str) -> None:
    """Numbers that are not representable are not rounded first."""
    assert_graph_is(ONE[name], [X.to(torch.bfloat16)])


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda x, i: x[i], [X, ints(3, below=2)]),
        (lambda x, i: x[:, i], [X, ints(2, 2, below=3) - 3]),
        (lambda x, i, j: x[i, j], [X, ints(2, 1, below=2), ints(3, below=3) - 3]),
        (lambda x, i, j: x[i, :, j], [X, ints(2, below=2), ints(2, below=4)]),
        (lambda x, i, j: x[:, i, j], [X, ints(2, below=3), ints(2, below=4)]),
        (lambda x, i: x.index_select(-1, i), [X, ints(6, below=4)]),
        (lambda x, i: x.gather(1, i), [X, ints(2, 2, 4, below=3)]),
        (lambda x, i: x.take_along_dim(i, -1), [X, ints(2, 3, 2, below=4)]),
        (lambda x, i: x.index_copy(1, i, x[:, :2] * 2), [X, torch.tensor([2, 0])]),
        (lambda x, i: x.index_add(0, i, x[:1].expand(3, -1, -1)), [X, torch.tensor([1, 1, 0])]),
        (lambda x, i: x.index_fill(1, i, 3.0), [X, torch.tensor([2, 0])]),
        (lambda x, i: x.index_put((i,), x[:1] + 1), [X, torch.tensor([1])]),
        (lambda x, i: x.index_put((i, i), torch.tensor(1.0), accumulate=True), [X, torch.tensor([1, 1, 0])]),
        (lambda x, i: x.masked_fill(x > 0, 0)[i], [X, torch.tensor([-1])]),
        (F.embedding, [ints(2, 3, below=3), randn(3, 4)]),
    ],
)
def test_indices(function: Callable[..., Any], args: list[Any]) -> None:
    """Of one axis or several, also negative ones."""
    assert assert_graph_is(function, args).hosts == []


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.Linear(4, 5),
        torch.nn.Linear(4, 5, bias=False),
        torch.nn.LayerNorm(4),
        torch.nn.LayerNorm((3, 4), bias=False),
        torch.nn.GroupNorm(3, 3),
        torch.nn.BatchNorm1d(3),
        torch.nn.RMSNorm(4),
        torch.nn.Conv1d(3, 6, 2, stride=2, padding=1, groups=3),
        torch.nn.Conv1d(3, 2, 2, dilation=2, padding="same"),
        torch.nn.MaxPool1d(2, ceil_mode=True),
        torch.nn.AvgPool1d(2, padding=1),
        torch.nn.AdaptiveAvgPool1d(1),
        torch.nn.AdaptiveAvgPool1d(2),
        torch.nn.Dropout(),
        torch.nn.MultiheadAttention(4, 2, batch_first=True),
        torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    ],
    ids=str,
)
def test_layers(module: torch.nn.Module) -> None:
    """Modules of torch.nn in evaluation."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                torch.nn.init.uniform_(tensor, 0.1, 1.0)
    args = [X, X, X] if isinstance(module, torch.nn.MultiheadAttention) else [X]
    assert assert_graph_is(module.eval(), args).hosts == []


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False),
        torch.nn.MaxPool2d(2),
        torch.nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        torch.nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False, padding=1),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.AdaptiveAvgPool2d((3, 1)),
        torch.nn.BatchNorm2d(2),
        torch.nn.PixelShuffle(1),
    ],
    ids=str,
)
def test_layers_of_images(module: torch.nn.Module) -> None:
    """Over two axes, with a batch and without one."""
    image = randn(2, 2, 6, 5)
    assert assert_graph_is(module.eval(), [image]).hosts == []
    if not isinstance(module, torch.nn.BatchNorm2d):
        assert assert_graph_is(module, [image[0]]).hosts == []


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((Q, Q, Q), {}),
        ((Q, Q, Q), {"is_causal": True}),
        ((Q, Q, Q), {"scale": 0.3, "attn_mask": randn(5, 5)}),
        ((Q, K, V), {"enable_gqa": True}),
        ((Q, K, V), {"enable_gqa": True, "is_causal": True}),
        ((Q, K, V), {"enable_gqa": True, "attn_mask": randn(2, 1, 5, 6) > 0}),
        ((Q, K[:, :1], V[:, :1]), {"attn_mask": randn(1, 6) > -9}),
        ((Q[0], Q[0], Q[0]), {"is_causal": True}),
    ],
)
def test_attention(args: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    """Masks of both kinds, shared heads, other numbers of keys: torch aligns at the first key."""
    call = Function(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options))
    exported = assert_graph_is(call, args)
    assert "attention" in operations(exported)


@pytest.mark.parametrize("k", [(3,), (2, 3), (1, 2, 2, 3)])
def test_products(k: tuple[int, ...]) -> None:
    """Matrices with any number of axes; `addmm` with factors."""
    assert_graph_is(lambda a, b: a @ b, [randn(*k), randn(3, 2)])
    assert_graph_is(lambda x, a, b: torch.addmm(x, a, b, beta=0.5, alpha=2), [randn(2), randn(4, 3), randn(3, 2)])


@settings(max_examples=12)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4).flatmap(
        lambda shape: st.tuples(
            st.just(shape),
            st.permutations(range(len(shape))),
            st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5), st.integers(1, 3)), min_size=1, max_size=3),
        )
    )
)
def test_views_of_views(drawn: tuple[list[int], list[int], list[tuple[int, int, int]]]) -> None:
    """Axes in any order, parts as Python names them, everything flat again."""
    shape, order, cuts = drawn
    parts = tuple(slice(*cut) for cut in cuts[: len(shape)])

    def views(x: Tensor) -> Tensor:
        return x.permute(order)[parts].reshape(-1) + 1

    assert_graph_is(views, [randn(*shape)])


BATCH, SEQ = Dim("batch", min=1, max=9), Dim("seq", min=1, max=32)


def test_sizes_may_be_symbols() -> None:
    """One graph for every size in the range, with masks made of the sizes."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(7, 8)
            self.project = torch.nn.Linear(8, 24)

        def forward(self, ids: Tensor) -> Tensor:
            b, s = ids.shape
            x = self.embed(ids) + torch.arange(s)[None, :, None] / 10
            q, k, v = self.project(x).view(b, s, 3, 2, 4).permute(2, 0, 3, 1, 4)
            mask = torch.ones(s, s, dtype=torch.bool).tril()
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = torch.cat([x, x[:, :, s // 2 :]], 2).transpose(1, 2).reshape(b, -1, 8)
            return F.pad(x, (0, 0, 0, s))[:, :-1].mean(1) / s

    more = [[ints(b, s, below=7)] for b, s in [(1, 1), (3, 2), (2, 9)]]
    exported = assert_graph_is(Model(), [ints(2, 5, below=7)], *more, dynamic_shapes=({0: BATCH, 1: SEQ},))
    assert exported.hosts == []
    with pytest.raises(ValueError, match="the graph was exported for 1 to 32"):
        run(exported, [ints(2, 33, below=7)])


def test_what_has_no_handler_stays_torchs() -> None:
    """Each result that is read is a node; sizes come along as numbers."""

    def model(x: Tensor) -> Any:
        values, places = x.sort(-1)
        return values + 1, places, x.flatten().topk(x.shape[0]).values

    exported = assert_graph_is(model, [randn(3, 4)], [randn(5, 4)], dynamic_shapes=({0: BATCH},))
    assert exported.hosts == ["aten.sort.default", "aten.topk.default"]
    assert operations(exported).count("host") == 3
    graph_alone = export(Function(model), [randn(3, 4)])
    assert len(graph_alone.host_calls) == 2


def test_a_cache_is_an_input_and_an_update() -> None:
    """The model's own buffer goes in; its new contents come out; the buffer stays."""

    class Cache(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4, 2))
            self.weight = torch.nn.Parameter(randn(2))

        def forward(self, at: Tensor, x: Tensor) -> Tensor:
            self.seen.index_copy_(0, at, x * self.weight)
            return self.seen.sum(0)

    model, at, x = Cache(), torch.tensor([2, 0]), randn(2, 2)
    exported = export(model, [at, x])
    result, updates = run(exported, [at, x])
    assert not model.seen.any()
    with torch.no_grad():
        expected = model(at, x)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(updates, [model.seen])
    assert "index_copy" in operations(exported)


def test_weights_are_the_models_own_memory() -> None:
    """No copy is made: a weight that changes changes the graph, and tied weights are one constant."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    exported = export(model, [randn(2, 3)])
    assert [one.data_ptr() for one in exported.constants] == [model[0].weight.data_ptr()]
    with torch.no_grad():
        model[0].weight.mul_(2)
        expected = model(randn(2, 3))
    torch.testing.assert_close(run(exported, [randn(2, 3)])[0], expected)


def test_arguments_and_results_keep_their_structure() -> None:
    """Dictionaries, plain numbers, None, an argument given back."""

    def model(x: dict[str, Tensor], n: int, nothing: None) -> dict[str, Any]:
        return {"y": [x["a"] * n, x["b"]], "n": n, "none": nothing}

    exported = assert_graph_is(model, [{"a": randn(2), "b": randn(3)}, 3, None])
    with pytest.raises(ExportError, match="was exported for arguments"):
        exported.flatten([{"a": randn(2)}, 3, None])


def test_what_cannot_be_exported_names_its_line() -> None:
    """A branch on values, a size out of values; what is no module is refused too."""

    class Branch(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x

    class Chosen(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0] + 1

    for model, code in ((Branch(), "x.sum() > 0"), (Chosen(), "x[x > 0]")):
        with pytest.raises(ExportError) as raised:
            export(model, [X])
        assert raised.value.code == "NOT_EXPORTABLE"
        assert "test_export_handlers.py" in raised.value.line, raised.value
        assert code in raised.value.line
    with pytest.raises(ExportError, match=r"no torch\.nn\.Module"):
        export(torch.relu, [X])  # type: ignore[arg-type]


def test_own_operators_are_primitives() -> None:
    """`torch.ops.layerzero.*` in a traced model."""
    import layerzero as lz

    def model(x: Tensor, w: Tensor, q: Tensor) -> Any:
        y = lz.silu_mul(lz.gelu(lz.rms_norm(x, w)), lz.layer_norm(x, 4, w, w))
        return lz.softmax(lz.linear(y, lz.embedding(torch.tensor([0, 1, 0]), x[0]))), lz.attention(q, q, q, scale=0.5)

    exported = assert_graph_is(model, [X, randn(4), Q])
    assert exported.hosts == []


def test_each_handler_is_for_an_op_of_torch() -> None:
    """A handler under a wrong name would never be called."""
    for name in HANDLERS:
        space, op, overload = name.split(".")
        if space == "aten":
            assert hasattr(torch.ops.aten, op), name
            assert overload in getattr(torch.ops.aten, op).overloads(), name
