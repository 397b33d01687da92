"""The CPU backends' kernels, called directly: over every case of testdata/ they declare to take, and beyond."""

from __future__ import annotations

import inspect
import math
import os
import sys
import types
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import adapter_cases
import pytest
import torch
from adapter_cases import BACKENDS, Kernel
from torch import Tensor

HERE = ("torch", "onednn")
ELSEWHERE = ("zentorch",)
DECLARED = [kernel for backend in HERE for kernel in adapter_cases.kernels(backend)]
# A kernel whose library does not use an instruction set it needs is never chosen here.
KERNELS = [kernel for kernel in DECLARED if not kernel.lacking]
DIFFERENTIABLE = [kernel for kernel in KERNELS if kernel.rules.get("autograd")]
NOT_HERE = [kernel for backend in ELSEWHERE for kernel in adapter_cases.kernels(backend)]
by_id = attrgetter("id")


@pytest.fixture(scope="module")
def torch_kernels() -> dict[str, Any]:
    """The functions of the torch backend by kernel id."""
    functions: dict[str, Any] = adapter_cases.adapter("torch").KERNELS
    return functions


def schema_names(ops: tuple[str, ...]) -> set[str]:
    """The inputs and parameters that some case of the operations gives, and those that are usually left out."""
    cases = [case for op in ops for case in adapter_cases.cases(op)]
    given = {name for case in cases for name in (*case.tensors, *case.params)}
    return given | set(adapter_cases.DEFAULTS) | {"layout", "eps"}


@pytest.mark.parametrize("backend", [*HERE, *ELSEWHERE])
def test_document_and_adapter_name_the_same_kernels(backend: str) -> None:
    document = adapter_cases.document(backend)
    assert document["schema_version"] == "1.0" and document["backend"] == backend and document["platform"] == "cpu"
    listed = [kernel["kernel_id"] for kernels in document["ops"].values() for kernel in kernels]
    assert len(listed) == len(set(listed))
    functions = adapter_cases.adapter(backend).KERNELS
    assert set(listed) == set(functions)
    for kernel in adapter_cases.kernels(backend):
        parameters = inspect.signature(kernel.run).parameters
        assert set(parameters) <= schema_names(kernel.ops), kernel.id
        assert all(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


def test_every_folder_is_a_backend() -> None:
    folders = {path.parent.name for path in BACKENDS.glob("**/capabilities.json")}
    known = adapter_cases.load_backends()
    assert folders == {*known.BACKENDS, *known.UNPROVEN}
    assert not set(known.BACKENDS) & set(known.UNPROVEN)


@pytest.mark.parametrize("backend", HERE)
def test_detection(backend: str) -> None:
    assert adapter_cases.adapter(backend).detect() == torch.__version__


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_kernel_agrees_with_the_cases(kernel: Kernel) -> None:
    taken = [c for op in kernel.ops for c in adapter_cases.cases(op) if not adapter_cases.reason_to_skip(kernel, c)]
    wrong = {f"{c.op} {c.name}": problems for c in taken if (problems := adapter_cases.run(kernel, c))}
    assert not wrong
    # A kernel that takes no numbers draws its own: test_draws_follow_the_distribution holds it to the distribution.
    assert taken or hasattr(kernel.run, "draws_itself"), "no case reaches this kernel"


@pytest.mark.parametrize("kernel", [k for k in DECLARED if k.id.startswith("onednn.")], ids=by_id)
def test_onednn_refuses_exactly_the_kernels_whose_instruction_sets_it_lacks(kernel: Kernel) -> None:
    dtype = adapter_cases.DTYPES[kernel.rules["dtypes"][0]]
    x, weight = torch.randn(3, 5).to(dtype), torch.randn(5, 5).to(dtype)
    arguments: dict[str, Any] = {"input": x, "weight": weight, "up_weight": weight, "down_weight": weight}
    arguments |= {"bias": None, "gate_weight": None, "activation": "silu"}
    taken = {name: arguments[name] for name in inspect.signature(kernel.run).parameters}
    if kernel.lacking:
        with pytest.raises(RuntimeError):
            kernel.run(**taken)
    else:
        assert kernel.run(**taken).dtype == dtype


def test_every_operation_but_tokenization_has_a_kernel() -> None:
    served = {op for kernel in adapter_cases.kernels("torch") for op in kernel.ops}
    assert served == {path.stem for path in (adapter_cases.ROOT / "testdata" / "ops").glob("*.json")}


#: Cases for each kernel: numerical gradients take a call for each number.
CHECKED = 25 if os.environ.get("LZ_TEST_SCALE") == "full" else 4


@pytest.mark.parametrize("kernel", DIFFERENTIABLE, ids=by_id)
def test_gradients_reach_every_float_input(kernel: Kernel) -> None:
    # Where a kernel computes in float32, differences must be larger to be seen.
    precision: dict[str, Any] = {} if "float64" in kernel.rules["dtypes"] else {"eps": 1e-3, "atol": 5e-3, "rtol": 5e-3}
    checked = 0
    for case in (case for op in kernel.ops for case in adapter_cases.cases(op)):
        if case.expect is None or adapter_cases.reason_to_skip(kernel, case):
            continue
        inputs = case.inputs()
        floats = [name for name, tensor in inputs.items() if tensor.is_floating_point()]
        finite = all(bool(inputs[name].double().isfinite().all()) for name in floats)
        if not finite or any(inputs[name].numel() == 0 for name in floats) or checked >= CHECKED:
            continue
        # The case's numbers in float64, a little off the places where a function has a kink.
        torch.manual_seed(0)
        numbers = [inputs[name].double() for name in floats]
        leaves = [(x + 1e-2 * torch.randn(x.shape, dtype=torch.float64)).requires_grad_() for x in numbers]

        def call(
            *given: Tensor, case: Any = case, floats: list[str] = floats, inputs: dict[str, Tensor] = inputs
        ) -> Any:
            tensors = {**inputs, **dict(zip(floats, given, strict=True))}
            return kernel.run(**dict(adapter_cases.arguments(kernel, case, tensors)))

        # Logarithms are float32, whatever the inputs are.
        coarse = {"eps": 1e-3, "atol": 5e-3, "rtol": 5e-3} if "lse" in case.expect else precision
        assert torch.autograd.gradcheck(call, leaves, **coarse), case.name
        checked += 1
    assert checked >= 3


def attention_by_rows(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Attention of one head in float64, a row at a time, over just the keys that take part."""
    output = torch.zeros(q.shape[0], v.shape[1], dtype=torch.float64)
    for i in range(q.shape[0]):
        takes_part = allowed[i].nonzero().flatten()
        if takes_part.numel():
            scores = (k[takes_part].double() @ q[i].double()) / math.sqrt(q.shape[1])
            output[i] = torch.softmax(scores, 0) @ v[takes_part].double()
    return output


@pytest.mark.parametrize("kernel_id", ["torch.sdpa.flash", "torch.sdpa.math", "torch.attention.unfused"])
@pytest.mark.parametrize("seq_k", [1, 3, 9, 15, 16, 17, 40, 64, 65, 130, 513])
@pytest.mark.parametrize("mode", ["full", "causal", "mask", "float mask", "window"])
def test_a_nan_counts_exactly_where_it_takes_part(
    torch_kernels: dict[str, Any], kernel_id: str, seq_k: int, mode: str
) -> None:
    if kernel_id == "torch.sdpa.flash" and seq_k < adapter_cases.KEYS_THAT_KEEP_A_NAN:
        pytest.skip("the kernel takes no fewer keys")
    torch.manual_seed(seq_k)
    run = torch_kernels[kernel_id]
    for place in ("query", "key", "value", "all of key"):
        seq_q = seq_k if mode == "causal" and seq_k % 2 else max(seq_k // 2, 1)
        q, k, v = (torch.randn(1, 1, n, 8) for n in (seq_q, seq_k, seq_k))
        {"query": q[0, 0, -1:], "key": k[0, 0, -1:], "value": v[0, 0, -1:], "all of key": k[0, 0]}[place][:, 2] = (
            math.nan
        )
        position = torch.arange(seq_k - seq_q, seq_k)[:, None] - torch.arange(seq_k)
        allowed, mask = torch.ones(seq_q, seq_k, dtype=torch.bool), None
        if mode == "causal":
            allowed = position >= 0
        elif mode == "window":
            allowed = (position >= 0) & (position <= 2)
        elif mode in ("mask", "float mask"):
            allowed = torch.rand(seq_q, seq_k) > 0.5
            allowed[0] = False
            mask = allowed if mode == "mask" else torch.zeros(seq_q, seq_k).masked_fill(~allowed, -math.inf)
        extra = (None, None) if kernel_id == "torch.attention.unfused" else ()
        tail = (0.0, 0.0, 0) if kernel_id == "torch.attention.unfused" else ()
        window = 2 if mode == "window" else -1
        causal = mode in ("causal", "window")
        got = run(q, k, v, mask, *extra, causal, None, window, -1, *tail, "BHSD")[0, 0].double()
        wanted = attention_by_rows(q[0, 0], k[0, 0], v[0, 0], allowed)
        if kernel_id.startswith("torch.sdpa."):
            # They multiply what gets no weight by zero, so that a NaN may reach further rows; none may be lost.
            assert not (wanted.isnan() & ~got.isnan()).any()
            wanted = torch.where(got.isnan(), math.nan, wanted)
        torch.testing.assert_close(
            got,
            wanted,
            rtol=1e-5,
            atol=1e-5,
            equal_nan=True,
        )


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.ops == ("mlp.fused",)], ids=by_id)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_a_nan_stays_in_its_row_of_a_feed_forward_block(kernel: Kernel, gated: bool, activation: str) -> None:
    if activation not in kernel.rules["params"]["activation"].get("one_of", [activation]):
        pytest.skip("not declared")
    dtype = adapter_cases.DTYPES[kernel.rules["dtypes"][0]]
    x, up, down = (torch.randn(size).to(dtype) for size in ((3, 33), (70, 33), (33, 70)))
    x[1, 5] = math.nan
    output = kernel.run(x, up, down, torch.randn(70, 33).to(dtype) if gated else None, activation)
    assert output.isnan().all(1).tolist() == output.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_infinite_values_that_take_no_part_do_not_leak(torch_kernels: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 70, 8).to(dtype) for _ in range(3))
    v[0, 0, 40, 1], v[0, 1, 69, 3] = math.inf, -math.inf
    expected = torch.stack(
        [attention_by_rows(q[0, h], k[0, h], v[0, h], torch.ones(70, 70).tril() > 0) for h in (0, 1)]
    )
    got = torch_kernels["torch.attention.unfused"](q, k, v, None, None, None, True, None, -1, -1, 0.0, 0.0, 0, "BHSD")
    tolerance = adapter_cases.TOLERANCES[dtype]
    torch.testing.assert_close(got[0].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("seq_q", "seq_k", "heads", "kv_heads"), [(96, 96, 4, 4), (33, 200, 6, 2), (1, 300, 8, 1)])
def test_dense_kernels_agree_at_real_sizes(
    torch_kernels: dict[str, Any], layout: str, dtype: torch.dtype, seq_q: int, seq_k: int, heads: int, kv_heads: int
) -> None:
    torch.manual_seed(0)
    sizes = [(2, h, n, 64) for h, n in ((heads, seq_q), (kv_heads, seq_k), (kv_heads, seq_k))]
    q, k, v = (torch.randn(size).to(dtype) for size in sizes)
    allowed = torch.ones(seq_q, seq_k).tril(seq_k - seq_q) > 0
    expected = torch.stack(
        [
            torch.stack(
                [
                    attention_by_rows(q[b, h], k[b, h * kv_heads // heads], v[b, h * kv_heads // heads], allowed)
                    for h in range(heads)
                ]
            )
            for b in range(2)
        ]
    )
    given = [t.transpose(1, 2).contiguous() if layout == "BSHD" else t for t in (q, k, v)]
    for kernel_id in ("torch.sdpa.flash", "torch.sdpa.math", "torch.attention.unfused"):
        unfused = kernel_id == "torch.attention.unfused"
        extra, tail = ((None, None), (0.0, 0.0, 0)) if unfused else ((), ())
        try:
            got = torch_kernels[kernel_id](*given, None, *extra, True, None, -1, -1, *tail, layout)
        except RuntimeError as error:
            # torch's own call fails on a CPU with AMX where ATEN_CPU_CAPABILITY takes AVX-512 from it.
            assert "pack_vnni2" in str(error)
            continue
        got = got.transpose(1, 2) if layout == "BSHD" else got
        tolerance = adapter_cases.TOLERANCES[dtype]
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_mask_gets_its_gradient_from_the_flash_kernel_too(torch_kernels: dict[str, Any]) -> None:
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    torch_kernels["torch.sdpa.flash"](q, k, v, mask, False, None, -1, -1, "BHSD").sum().backward()
    assert mask.grad is not None and bool(mask.grad.any())


def test_dropout_is_a_function_of_the_seed_and_keeps_the_mean(torch_kernels: dict[str, Any]) -> None:
    q, k = torch.zeros(1, 1, 4000, 4), torch.zeros(1, 1, 2, 4)
    v = torch.ones(1, 1, 2, 1)

    def run(seed: int) -> Tensor:
        output = torch_kernels["torch.attention.unfused"](
            q, k, v, None, None, None, False, None, -1, -1, 0.0, 0.25, seed, "BHSD"
        )
        assert isinstance(output, Tensor)
        return output

    torch.testing.assert_close(run(7), run(7), rtol=0.0, atol=0.0)
    assert not torch.equal(run(7), run(8))
    assert abs(float(run(7).mean()) - 1.0) < 0.03
    assert {round(x, 4) for x in run(7).flatten().tolist()} == {0.0, 0.6667, 1.3333}


def test_draws_are_a_function_of_the_seed(torch_kernels: dict[str, Any]) -> None:
    logits = torch.randn(500, 30)
    for kernel_id, argument in (("torch.topk", 10), ("torch.topp", 0.9)):
        run = torch_kernels[kernel_id]
        assert torch.equal(run(logits, None, argument, 3), run(logits, None, argument, 3))
        assert not torch.equal(run(logits, None, argument, 3), run(logits, None, argument, 4))
    probabilities = torch.softmax(torch.randn(300, 4, 9), -1)
    ids = torch.randint(0, 9, (300, 3))
    run = torch_kernels["torch.speculative"]
    first, again = (run(ids, probabilities[:, :3].flip(-1), probabilities, None, 5) for _ in range(2))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], run(ids, probabilities[:, :3].flip(-1), probabilities, None, 6)[0])


def test_draws_follow_the_distribution(torch_kernels: dict[str, Any]) -> None:
    row = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    drawn = torch_kernels["torch.topk"](row.expand(20000, 4), None, 2, 11).bincount(minlength=4) / 20000
    torch.testing.assert_close(drawn, torch.tensor([0.0, 4 / 7, 0.0, 3 / 7]), atol=0.02, rtol=0.0)
    drawn = torch_kernels["torch.topp"](row.expand(20000, 4), None, 0.85, 12).bincount(minlength=4) / 20000
    torch.testing.assert_close(drawn, torch.tensor([0.0, 4 / 9, 2 / 9, 3 / 9]), atol=0.02, rtol=0.0)


@pytest.mark.parametrize("vocab", [7, 64, 5000, 40000])
@pytest.mark.parametrize("levels", [3, 200, None])
def test_sampling_from_large_vocabularies_and_ties(
    torch_kernels: dict[str, Any], vocab: int, levels: int | None
) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(6, vocab) if levels is None else torch.randint(0, levels, (6, vocab)) / 7.0
    logits[1, vocab // 2] = math.nan
    uniform = torch.rand(6, dtype=torch.float64)
    for k, p in ((1, 0.3), (5, 0.7), (vocab // 3 + 1, 0.95), (vocab, 1.0)):
        expected_k, expected_p = [], []
        for row, u in zip(logits.tolist(), uniform.tolist(), strict=True):
            order = sorted(range(vocab), key=lambda i: -row[i]) if not any(map(math.isnan, row)) else []
            expected_k.append(_drawn(row, order[:k], u))
            weights = [math.exp(row[i] - row[order[0]]) for i in order]
            total, kept, cumulative = math.fsum(weights), [], 0.0
            for i, weight in zip(order, weights, strict=True):
                kept.append(i)
                cumulative += weight / total
                if cumulative >= p:
                    break
            expected_p.append(_drawn(row, kept, u))
        assert torch_kernels["torch.topk"](logits, uniform, k, 0).tolist() == expected_k
        assert torch_kernels["torch.topp"](logits, uniform, p, 0).tolist() == expected_p


def _drawn(row: list[float], kept: list[int], u: float) -> int:
    if not kept:
        return -1
    weights = [math.exp(row[i] - row[kept[0]]) for i in kept]
    total, cumulative = math.fsum(weights), 0.0
    for i, weight in zip(kept, weights, strict=True):
        cumulative += weight / total
        if cumulative > u:
            return i
    return kept[-1]


def test_quantized_floats_are_rounded_once(torch_kernels: dict[str, Any]) -> None:
    # Just above a tie in float64, on it in float32: rounding twice would go down to the even neighbour.
    nearly = 1.0625 * (1 + 2**-40)
    one = torch.ones(1)
    values, _, _ = torch_kernels["torch.quantize"](
        torch.tensor([[nearly, 1.0625]], dtype=torch.float64), one, "fp8_e4m3", "per_tensor", None, False
    )
    assert values.double().tolist() == [[1.125, 1.0]]


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel", "blockwise"])
def test_dequantize_undoes_quantize(torch_kernels: dict[str, Any], dtype: str, granularity: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 5, 70)
    group = 16 if granularity == "blockwise" else None
    values, scales, zeros = torch_kernels["torch.quantize"](x, None, dtype, granularity, group, False)
    back = torch_kernels["torch.dequantize"](values, scales, zeros, "float32", granularity, group)
    step = {"int8": 1 / 127, "fp8_e4m3": 2**-3, "fp8_e5m2": 2**-2}[dtype]
    assert float((back - x).abs().max()) <= step * float(x.abs().max())
    assert scales.shape == {"per_tensor": (1, 1), "per_channel": (15, 1), "blockwise": (15, 5)}[granularity]


def test_results_are_fresh(torch_kernels: dict[str, Any]) -> None:
    x, scale = torch.randn(2, 4), torch.ones(1, 1)
    values, scales, _ = torch_kernels["torch.quantize"](x, scale, "int8", "per_tensor", None, False)
    assert scales.data_ptr() != scale.data_ptr() and values.data_ptr() != x.data_ptr()
    table = torch.empty(4, 0)
    rotated = torch_kernels["torch.rope"](torch.randn(1, 2, 1, 3), table, table, None, False, "BSHD")
    assert rotated.shape == (1, 2, 1, 3)


def test_detection_says_what_is_missing() -> None:
    with pytest.raises(ImportError, match="zentorch cannot be imported") as caught:
        adapter_cases.adapter("zentorch").detect()
    assert "\n" not in str(caught.value)


Calls = list[tuple[str, tuple[Any, ...]]]


class Fake:
    """Operators with the schemas of a library that is not installed, which compute with torch and record their calls."""

    def __init__(self, namespace: str, schemas: dict[str, str]) -> None:
        self.calls: Calls = []
        library: Any = torch.library.Library
        self.library = library(namespace, "FRAGMENT")
        for schema in schemas.values():
            self.library.define(schema)
        for name in schemas:
            self.library.impl(name, self._recorded(name), "CPU")

    def _recorded(self, name: str) -> Any:
        function = getattr(self, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args))
            return function(*args, **kwargs)

        return run


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    assert query.shape[1] == key.shape[1], "this kernel reads beyond its memory when heads are shared"
    assert not is_causal or query.shape[2] == key.shape[2], "this kernel aligns top-left"
    assert all(t.stride(-1) == 1 and t.numel() for t in (query, key, value)) and key.shape == value.shape
    output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, scale=scale
    )
    return output, sums


class FakeZentorch(Fake):
    """The operators of zentorch, with what its sources say about memory."""

    def zentorch_bmm(self, a: Tensor, b: Tensor, zentorch_op_name: str = "") -> Tensor:
        assert a.dim() == 3 and b.dim() == 3 and b.stride(0) >= b.shape[1] * b.shape[2]
        return torch.bmm(a, b)

    def zentorch_rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, zentorch_op_name: str = "") -> Tensor:
        assert x.dim() == 2 and x.is_contiguous() and weight.is_contiguous()
        return _rms(x, weight, epsilon)

    def zentorch_add_rms_norm_(
        self, x: Tensor, weight: Tensor, residual: Tensor, epsilon: float, zentorch_op_name: str = ""
    ) -> None:
        assert x.dim() == 2 and x.is_contiguous() and residual.is_contiguous()
        total = x.float() + residual.float()
        residual.copy_(total)
        x.copy_(_rms(total, weight, epsilon))

    def zentorch_sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        zentorch_op_name: str = "",
    ) -> tuple[Tensor, Tensor]:
        assert dropout_p == 0.0 and attn_mask is None
        return _flash(query, key, value, is_causal, scale)


ZENTORCH_SCHEMAS = {
    "zentorch_bmm": "zentorch_bmm(Tensor self, Tensor mat2, str zentorch_op_name='zentorch::zentorch_bmm') -> Tensor",
    "zentorch_rms_norm": "zentorch_rms_norm(Tensor input, Tensor weight, float epsilon, *, "
    "str zentorch_op_name='zentorch::zentorch_rms_norm') -> Tensor",
    "zentorch_add_rms_norm_": "zentorch_add_rms_norm_(Tensor(a!) input, Tensor weight, Tensor(b!) residual, "
    "float epsilon, *, str zentorch_op_name='zentorch::zentorch_add_rms_norm') -> ()",
    "zentorch_sdpa": "zentorch_sdpa(Tensor query, Tensor key, Tensor value , float dropout_p=0.0, "
    "bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None, "
    "str zentorch_op_name = 'zentorch::zentorch_sdpa')-> (Tensor, Tensor)",
}


@pytest.fixture(scope="module")
def fakes() -> Iterator[dict[str, Fake]]:
    """The library's operators, for as long as this module runs."""
    made: dict[str, Fake] = {"zentorch": FakeZentorch("zentorch", ZENTORCH_SCHEMAS)}
    yield made
    for fake in made.values():
        fake.library._destroy()


@pytest.mark.parametrize("kernel", NOT_HERE, ids=by_id)
def test_calls_of_libraries_that_are_not_here(fakes: dict[str, Fake], kernel: Kernel) -> None:
    fake = fakes[kernel.id.partition(".")[0]]
    fake.calls.clear()
    taken = [c for op in kernel.ops for c in adapter_cases.cases(op) if not adapter_cases.reason_to_skip(kernel, c)]
    wrong = {f"{c.op} {c.name}": problems for c in taken if (problems := adapter_cases.run(kernel, c))}
    assert not wrong
    # Without an eps torch computes a norm: ZenDNN refuses it, and gives what lay in memory.
    with_eps = [case for case in taken if case.params.get("eps", 1.0) > 0.0]
    assert len(fake.calls) >= len(with_eps) > 0
    assert len({name for name, _ in fake.calls}) == 1, "one operator per kernel"


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("kernel_id", ["zentorch.sdpa"])
@pytest.mark.parametrize("scale", [0.0, -0.4])
def test_scales_that_are_not_positive_are_turned(kernel_id: str, scale: float) -> None:
    # Like torch's kernel, which stands for them here, they mask before they scale.
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    got = adapter_cases.adapter(kernel_id.partition(".")[0]).KERNELS[kernel_id](q, k, v, True, scale, "BHSD")
    scores = scale * (q.double() @ k.double().transpose(-1, -2))
    ahead = torch.ones(20, 20, dtype=torch.bool).triu(1)
    want = torch.softmax(scores.masked_fill(ahead, -math.inf), -1) @ v.double()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_detection_asks_for_the_operators(fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("zentorch")
    module.__dict__["__version__"] = "2.11.0.3"
    monkeypatch.setitem(sys.modules, "zentorch", module)
    zentorch = adapter_cases.adapter("zentorch")
    assert zentorch.detect() == "2.11.0.3"
    monkeypatch.setattr(zentorch, "_OPERATORS", ("zentorch_no_such_operator",))
    with pytest.raises(ImportError, match="has no zentorch_no_such_operator"):
        zentorch.detect()
