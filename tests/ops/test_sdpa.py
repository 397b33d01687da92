"""`lz.scaled_dot_product_attention` is torch's function: same arguments, same results, same refusals."""

from __future__ import annotations

import inspect
from typing import Any

import layerzero as lz
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """A call that torch takes, in float64."""
    rank = draw(st.sampled_from((2, 3, 3, 4, 4, 4, 4, 5, 6)))
    gqa = rank >= 3 and draw(st.booleans())
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3)) if gqa else kv_heads
    lead = draw(st.lists(st.integers(1, 3), min_size=max(rank - 3, 0), max_size=max(rank - 3, 0)))
    queries, keys = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    dim, value_dim = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def made(count: int, seq: int, size: int) -> Tensor:
        # Leading sizes broadcast, and a single head does.
        sizes = [n if draw(st.integers(0, 3)) else 1 for n in lead]
        head = [] if rank == 2 else [count if gqa or draw(st.integers(0, 5)) else 1]
        tensor = torch.randn(*sizes, *head, seq, size, generator=generator, dtype=torch.float64)
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if draw(st.booleans()) else tensor

    call: dict[str, Any] = {
        "query": made(heads, queries, dim),
        "key": made(kv_heads, keys, dim),
        "value": made(kv_heads, keys, value_dim),
        "enable_gqa": gqa,
    }
    if gqa:
        # torch broadcasts no heads there.
        call["value"] = call["value"].expand(*call["value"].shape[:-3], call["key"].shape[-3], keys, value_dim)
    kind = draw(st.sampled_from(("none", "causal", "bool", "float")))
    if kind == "causal":
        call["is_causal"] = True
    elif kind != "none":
        full = [*torch.broadcast_shapes(*(call[n].shape[:-2] for n in ("query",))), queries, keys]
        mask = [n if draw(st.integers(0, 2)) else 1 for n in full][draw(st.integers(0, max(len(full) - 2, 0))) :]
        values = torch.randn(mask, generator=generator, dtype=torch.float64)
        call["attn_mask"] = values > -0.5 if kind == "bool" else values.masked_fill(values < -1.0, float("-inf"))
    if draw(st.booleans()):
        call["scale"] = draw(st.sampled_from((0.1, 1.0, 0.0, -0.5, 2.0)))
    return call


@examples(600)
@given(call=calls())
def test_it_gives_what_torch_gives(call: dict[str, Any]) -> None:
    # A single head of several is broadcast by torch's own arithmetic, which is not in every one of its kernels.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        try:
            want = F.scaled_dot_product_attention(**call)
        except RuntimeError:
            want = None
    if want is None:
        with pytest.raises(lz.LayerZeroError):
            lz.scaled_dot_product_attention(**call)
        return
    out = lz.scaled_dot_product_attention(**call)
    assert out.shape == want.shape and out.dtype == want.dtype
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 6), (6, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize("shape", [(2, 4), (4,), (2, 1, 4), ()])
def test_causal_is_aligned_top_left(shape: tuple[int, ...], queries: int, keys: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(*shape, queries, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(*shape, keys, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    allowed = torch.arange(keys) <= torch.arange(queries)[:, None]
    scores = (q @ k.transpose(-1, -2) * 8**-0.5).masked_fill(~allowed, float("-inf"))
    want = torch.softmax(scores, -1) @ v
    out = lz.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, want)
    weights = torch.randn_like(want)
    torch.testing.assert_close(
        torch.autograd.grad((out * weights).sum(), (q, k, v)), torch.autograd.grad((want * weights).sum(), (q, k, v))
    )


def test_the_layout_in_force_does_not_matter() -> None:
    q = torch.randn(2, 3, 6, 8)
    want = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    for layout in ("BSHD", "BHSD"):
        with lz.layout(layout):
            torch.testing.assert_close(lz.scaled_dot_product_attention(q, q, q, is_causal=True), want)


def test_it_is_selected_as_any_attention() -> None:
    """A kernel of the operator's choice runs, not torch's function by another name."""
    q = torch.randn(1, 2, 6, 8)
    (call,) = lz.calls_of(lambda t: lz.scaled_dot_product_attention(t, t, t, is_causal=True), q)
    assert call.to_dict()["call"]["layout"] == "BHSD" and call.source == "layerzero.attention"
    with lz.disabled():
        want = lz.attention(q, q, q, layout="BHSD")
        assert torch.equal(lz.scaled_dot_product_attention(q, q, q, is_causal=True), want)


def test_what_torch_refuses_is_refused() -> None:
    q, k = torch.randn(1, 6, 4, 8), torch.randn(1, 3, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool)
    refused: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((q, k, k), {}),
        ((q, torch.randn(1, 4, 4, 8), torch.randn(1, 4, 4, 8)), {"enable_gqa": True}),
        ((q, q, q), {"attn_mask": mask, "is_causal": True}),
        ((q, k[..., :5], k), {"enable_gqa": True}),
        ((q, q, q[:, :, :3]), {}),
        ((q, q, q), {"attn_mask": torch.ones(4, 3, dtype=torch.bool)}),
        ((torch.randn(8), q, q), {}),
        ((q.repeat(2, 1, 1, 1), q.repeat(3, 1, 1, 1), q), {}),
    ]
    for args, kwargs in refused:
        # Not every kernel of torch's looks.
        with pytest.raises(RuntimeError), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            F.scaled_dot_product_attention(*args, **kwargs)
        with pytest.raises(lz.InvalidCallError) as caught:
            lz.scaled_dot_product_attention(*args, **kwargs)
        assert caught.value.hint
    lz.scaled_dot_product_attention(q, k, k, enable_gqa=True)


def test_its_arguments_are_torchs() -> None:
    parameters = inspect.signature(lz.scaled_dot_product_attention).parameters
    wanted = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    assert list(parameters) == ["query", "key", "value", *wanted]
    assert {n: p.default for n, p in parameters.items() if n in wanted} == wanted
    q = torch.randn(1, 2, 4, 8)
    lz.scaled_dot_product_attention(q, q, q, None, 0.0, True)
    with pytest.raises(TypeError):
        lz.scaled_dot_product_attention(q, q, q, None, 0.0, True, 1.0)  # type: ignore[misc]


@pytest.mark.parametrize("shape", [(2, 4, 6, 8), (4, 6, 8), (2, 2, 4, 6, 8)])
def test_it_compiles_as_one_graph(shape: tuple[int, ...]) -> None:
    torch.compiler.reset()
    q = torch.randn(*shape, requires_grad=True)
    k = torch.randn(*shape[:-2], 3, 8)
    compiled = torch.compile(
        lambda q, k: lz.scaled_dot_product_attention(q, k, k, is_causal=True), backend="aot_eager", fullgraph=True
    )
    want = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    torch.testing.assert_close(compiled(q, k), want)
    torch.testing.assert_close(torch.autograd.grad(compiled(q, k).sum(), q), torch.autograd.grad(want.sum(), q))


def test_vmap_and_autocast() -> None:
    q = torch.randn(3, 2, 4, 6, 8)
    out = torch.vmap(lambda t: lz.scaled_dot_product_attention(t, t, t, is_causal=True))(q)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q, is_causal=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lz.scaled_dot_product_attention(q[0], q[0], q[0]).dtype == torch.bfloat16


def test_dropout_drops() -> None:
    q = torch.zeros(1, 1, 2000, 4)
    k = torch.ones(1, 1, 8, 4)
    out = lz.scaled_dot_product_attention(q, k, k, dropout_p=0.5)
    counts = out[0, 0, :, 0] * 8 * 0.5
    assert (counts - counts.round()).abs().max() < 1e-4 and abs(float(counts.mean()) - 4.0) < 0.2
