"""Our Triton kernels as part of graphs that torch traces: the launches are those made outside of graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from layerzero.backends.triton import launching
from layerzero.backends.triton.adapter import KERNELS, TRACED
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

pytestmark = pytest.mark.skipif(launching.INTERPRETED, reason="Triton interprets its kernels in this process")

#: The kernel, query heads, key heads, queries, keys, and how.
CALLS: dict[str, tuple[str, int, int, int, int, dict[str, Any]]] = {
    "window": ("triton.attention.gqa", 8, 2, 96, 96, {"causal": True, "window_left": 40}),
    "softcap": ("triton.attention", 4, 4, 96, 120, {"causal": True, "softcap": 20.0}),
    "few queries": ("triton.attention.gqa", 8, 2, 20, 96, {}),
    "decode": ("triton.decode.gqa", 8, 2, 1, 900, {}),
    "long decode": ("triton.decode", 4, 4, 1, 9000, {"softcap": 20.0, "window_left": 5000}),
}


def _tensors(heads: int, kv_heads: int, seq_q: int, seq_k: int, layout: str) -> list[Tensor]:
    sizes = ((seq_q, heads), (seq_k, kv_heads), (seq_k, kv_heads))
    made = [torch.randn(2, length, many, 64, dtype=torch.bfloat16) for length, many in sizes]
    return [one.transpose(1, 2) for one in made] if layout == "BHSD" else made


def _arguments(kernel: str, layout: str, how: dict[str, Any]) -> dict[str, Any]:
    given = {"scale": None, "window_left": -1, "softcap": 0.0, "layout": layout}
    if "decode" not in kernel:
        given |= {"attn_mask": None, "causal": False, "window_right": -1}
    return given | how


def _launches(graph: GraphModule) -> list[dict[str, Any]]:
    """The arguments of the launches of a graph by name, tensors left out."""
    found = []
    for node in graph.graph.nodes:
        if node.target is triton_kernel_wrapper_mutation:
            constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
            found.append({**constants, **node.kwargs["kwargs"], "grid": node.kwargs["grid"][0][0]})
    return found


def _made(kernel: str, tensors: list[Tensor], given: dict[str, Any]) -> list[dict[str, Any]]:
    """The same of the launches that the kernel makes outside of a graph."""
    with launching.noting() as noted:
        KERNELS[kernel](*tensors, **given)
    return [dict(zip(launch.kernel.arg_names, launch.arguments, strict=True)) for launch in noted]


@pytest.mark.parametrize("case", CALLS)
def test_the_launches_are_those_outside_of_graphs(case: str) -> None:
    kernel, heads, kv_heads, seq_q, seq_k, how = CALLS[case]
    tensors = _tensors(heads, kv_heads, seq_q, seq_k, "BSHD")
    given = _arguments(kernel, "BSHD", how)
    graph = make_fx(lambda q, k, v: KERNELS[kernel].traced(q, k, v, **given), tracing_mode="fake")(*tensors)  # type: ignore[attr-defined]
    traced, made = _launches(graph), _made(kernel, tensors, given)
    assert len(traced) == len(made) > 0
    for here, there in zip(traced, made, strict=True):
        numbers = {name: value for name, value in there.items() if not isinstance(value, Tensor) and value is not None}
        assert {name: here[name] for name in numbers} == numbers


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("case", CALLS)
def test_sizes_that_vary_stay_so(case: str, layout: str) -> None:
    kernel, heads, kv_heads, seq_q, seq_k, how = CALLS[case]
    tensors = _tensors(heads, kv_heads, seq_q, seq_k, layout)
    given = _arguments(kernel, layout, how)
    graph = make_fx(lambda q, k, v: KERNELS[kernel].traced(q, k, v, **given), tracing_mode="symbolic")(*tensors)  # type: ignore[attr-defined]
    first = _launches(graph)[0]
    assert isinstance(first["seq_k"], torch.fx.Node)
    assert isinstance(first["grid"], torch.fx.Node)


def test_a_result_with_heads_first_lies_as_torchs_does() -> None:
    tensors = _tensors(8, 2, 96, 96, "BHSD")
    given = _arguments("triton.attention.gqa", "BHSD", {"causal": True})
    trace = KERNELS["triton.attention.gqa"].traced  # type: ignore[attr-defined]
    graph = make_fx(lambda q, k, v: trace(q, k, v, **given), tracing_mode="fake")(*tensors)
    (output,) = next(node for node in graph.graph.nodes if node.op == "output").args
    assert output.meta["val"].transpose(1, 2).is_contiguous()
    (launch,) = _launches(graph)
    heads, width, length = 8, 64, 96
    assert (launch["y_batch"], launch["y_head"], launch["Y_TOKEN"]) == (heads * width * length, width, heads * width)


def _source(launch: launching.Noted) -> ASTSource:
    """What torch's compiler has Triton compile: numbers are float64, an integer that is 1 is a constant."""
    pointers = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for at, (parameter, value) in enumerate(zip(launch.kernel.params, launch.arguments, strict=True)):
        if parameter.is_constexpr or value is None or value == 1 if not isinstance(value, Tensor) else False:
            signature[parameter.name], constants[at,] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name], attributes[at,] = pointers[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp64" if isinstance(value, float) else "i32"
    return ASTSource(launch.kernel, signature, constants, attributes)


@pytest.mark.parametrize("case", CALLS)
def test_they_compile_with_the_types_that_compiled_code_gives_them(case: str) -> None:
    kernel, _, _, seq_q, seq_k, how = CALLS[case]
    # One head, so that many numbers are 1.
    heads = 4 if "gqa" in kernel else 1
    with launching.noting() as noted:
        KERNELS[kernel](*_tensors(heads, 1, seq_q, seq_k, "BSHD"), **_arguments(kernel, "BSHD", how))
    for launch in noted:
        options = {name: launch.options[name] for name in ("num_warps", "num_stages")}
        assert triton.compile(_source(launch), target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@pytest.mark.parametrize("gap", [1, 4])
def test_rows_that_begin_anywhere_are_not_traced(gap: int) -> None:
    q = torch.randn(1, 64, 4, 64 + gap, dtype=torch.bfloat16)[..., gap:]
    given = _arguments("triton.attention", "BSHD", {})
    trace = KERNELS["triton.attention"].traced  # type: ignore[attr-defined]
    with pytest.raises(launching.UntraceableError, match="16 bytes"):
        make_fx(lambda q: trace(q, q, q, **given), tracing_mode="fake")(q)
    assert not launching.is_traced()


def test_a_launch_of_a_graph_does_not_overlap() -> None:
    from layerzero.backends.triton.overlapping import overlaps

    with launching.traced():
        assert not overlaps(torch.device("cuda", 0))


def test_only_kernels_of_attention_are_traced() -> None:
    assert {kernel for kernel, function in KERNELS.items() if hasattr(function, "traced")} == TRACED
    assert "triton.rms_norm" not in TRACED
