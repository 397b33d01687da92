"""`lz.pack` and linear layers with packed weights: every kernel, against float64."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import layerzero as lz
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: The largest error, of the largest sum of absolute products: sums are float32, results are rounded to the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
OP = "mlp.linear.packed"
NATIVE = tuple(f"lz_cpu.linear_packed{isa}" for isa in ("", ".avx2", ".avx512", ".avx512_bf16", ".amx"))
ACTIVATIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers around 1, in memory of their own with a gap after each row."""
    make = torch.Generator().manual_seed(seed)
    padded = torch.randn(*shape[:-1], shape[-1] + seed % 3, generator=make).to(dtype)
    return padded[..., : shape[-1]]


@pytest.fixture(params=[*NATIVE, "torch.linear_packed"])
def kernel(restored: None, request: pytest.FixtureRequest) -> Iterator[str]:
    """Each kernel in turn, as the one that serves; those this CPU cannot run are skipped."""
    name = request.param
    listed = {kernel.kernel_id: kernel.available for kernel in lz.list_kernels()}
    if not listed[name]:
        pytest.skip(f"this CPU lacks the instructions of {name}")
    lz.force_kernel(OP, name)
    yield name
    lz.unforce_kernel(OP)


def only_bfloat16(kernel: str) -> bool:
    return kernel.endswith((".avx512_bf16", ".amx"))


def check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> None:
    """A packed layer gives what float64 gives."""
    packed = lz.pack(weight)
    if activation == "none":
        got = lz.linear(x, packed, bias)
    else:
        got = lz.linear_packed(x, packed, bias, activation=activation)
    sums = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    want = ACTIVATIONS[activation](sums)
    assert (got.shape, got.dtype) == (want.shape, x.dtype)
    size = F.linear(x.double().abs(), weight.double().abs()).max().item() if sums.numel() else 1.0
    torch.testing.assert_close(
        got.double(), want, rtol=TOLERANCE[x.dtype], atol=TOLERANCE[x.dtype] * max(size, 1.0) / 8
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 12, 13, 16, 17, 31, 32, 33])
def test_every_kernel_is_right_around_the_edges_of_its_tiles(kernel: str, rows: int, dtype: torch.dtype) -> None:
    if only_bfloat16(kernel) and dtype != torch.bfloat16:
        pytest.skip("computes with bfloat16 alone")
    for ins, outs in ((1, 1), (31, 31), (32, 32), (33, 33), (513, 65)):
        bias = drawn(3, outs, dtype=dtype) if outs % 2 else None
        check(drawn(rows, rows, ins, dtype=dtype), drawn(2, outs, ins, dtype=dtype), bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kernel_is_right_with_panels_side_by_side_and_in_groups(kernel: str, dtype: torch.dtype) -> None:
    """Few rows are computed with up to four panels of 32 outputs at a time, many with groups of 16 panels, in chunks of up to
    264 rows."""
    if only_bfloat16(kernel) and dtype != torch.bfloat16:
        pytest.skip("computes with bfloat16 alone")
    for rows, ins, outs in ((1, 530, 33), (1, 40, 129), (2, 530, 97), (3, 40, 161), (6, 40, 64), (7, 40, 129)):
        check(drawn(rows, rows, ins, dtype=dtype), drawn(2, outs, ins, dtype=dtype), drawn(3, outs, dtype=dtype))
    for rows, ins, outs in ((241, 1030, 545), (264, 40, 33), (265, 40, 33), (529, 600, 40)):
        check(drawn(rows, rows, ins, dtype=dtype), drawn(2, outs, ins, dtype=dtype), None)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_part_of_every_kernel(kernel: str, activation: str) -> None:
    for dtype in (torch.bfloat16,) if only_bfloat16(kernel) else DTYPES:
        x, weight = drawn(0, 5, 40, dtype=dtype), drawn(1, 50, 40, dtype=dtype) / 6
        check(x, weight, drawn(2, 50, dtype=dtype), activation)


def test_rows_and_columns_may_be_missing(kernel: str) -> None:
    dtype = torch.bfloat16 if only_bfloat16(kernel) else torch.float32
    for rows, ins, outs in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        check(torch.randn(rows, ins).to(dtype), torch.randn(outs, ins).to(dtype), torch.randn(outs).to(dtype))


def test_what_is_not_finite_stays_in_its_row_or_column(kernel: str) -> None:
    dtype = torch.bfloat16 if only_bfloat16(kernel) else torch.float32
    for value in (float("nan"), float("inf"), float("-inf")):
        x, weight = torch.ones(14, 33, dtype=dtype), torch.ones(35, 33, dtype=dtype)
        x[13, 32], weight[34, 0] = value, value
        got, want = lz.linear(x, lz.pack(weight)).double(), F.linear(x.double(), weight.double())
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_inputs_of_any_strides_are_right(kernel: str) -> None:
    dtype = torch.bfloat16 if only_bfloat16(kernel) else torch.float32
    weight, base = drawn(1, 40, 24, dtype=dtype), torch.randn(6, 24, 5).to(dtype)
    packed = lz.pack(weight)
    for x in (base.transpose(1, 2), base.transpose(1, 2)[::2], base.permute(2, 0, 1), base[:, :, 0].expand(4, 6, 24)):
        got = lz.linear(x, packed)
        want = F.linear(x.double(), weight.double())
        torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(kernel: str, dtype: torch.dtype) -> None:
    if only_bfloat16(kernel) and dtype != torch.bfloat16 or not kernel.startswith("lz_cpu.linear_packed"):
        pytest.skip("promises nothing of this dtype")
    x, packed = torch.randn(300, 700).to(dtype), lz.pack(torch.randn(145, 700).to(dtype))
    together = lz.linear(x, packed)
    for rows in (1, 2, 3, 12, 16, 29, 265):
        assert torch.equal(lz.linear(x[:rows], packed), together[:rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (31, 33), (32, 32), (70, 5), (0, 3), (3, 0)], ids=str)
def test_unpacking_gives_the_weight_back(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(*shape).to(dtype)
    packed = lz.pack(weight)
    assert packed.shape == shape and packed.dtype == dtype
    assert torch.equal(packed.unpack(), weight) and torch.equal(lz.pack(weight.t().contiguous().t()).unpack(), weight)


def test_a_packed_weight_says_what_it_is() -> None:
    packed = lz.pack(torch.nn.Linear(40, 33).weight)
    assert packed.format == "blocked_32x1" and packed.nbytes == 2 * 40 * 32 * 4
    assert repr(packed) == "PackedWeight(33x40 float32, blocked_32x1, 10,240 bytes)"
    assert lz.pack(torch.zeros(33, 40, dtype=torch.bfloat16)).format == "blocked_32x2"
    assert (packed.out_features, packed.in_features, packed.device.type) == (33, 40, "cpu")
    assert not packed.blocks.requires_grad


def test_the_memory_is_freed_with_the_object() -> None:
    packed = lz.pack(torch.randn(8, 8))
    blocks = weakref.ref(packed.blocks)
    lz.linear(torch.randn(2, 8), packed)
    del packed
    gc.collect()
    assert blocks() is None


def test_the_copy_does_not_follow_the_weight() -> None:
    weight = torch.ones(4, 4)
    packed = lz.pack(weight)
    weight.zero_()
    assert torch.equal(lz.linear(torch.ones(1, 4), packed), torch.full((1, 4), 4.0))


def test_packed_weights_are_copied_and_pickled() -> None:
    packed = lz.pack(torch.randn(5, 7))
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert torch.equal(other.unpack(), packed.unpack()) and other.blocks is not packed.blocks


def test_selection_names_the_packed_operation() -> None:
    x, packed = torch.randn(2, 8), lz.pack(torch.randn(4, 8))
    assert lz.which("linear", x, packed).op == OP
    assert lz.which("linear", x, packed).kernel_id.startswith("lz_cpu.linear_packed")
    text = str(lz.explain("linear", x, weight=packed))
    assert OP in text and "torch.linear_packed" in text
    assert lz.validate("torch.linear_packed", x, packed).valid
    assert not lz.validate("lz_cpu.linear_packed.amx", x, packed).valid
    assert lz.run_kernel("torch.linear_packed", x, packed).shape == (2, 4)


def test_many_rows_are_torchs_unless_results_must_not_depend_on_the_batch() -> None:
    packed = lz.pack(torch.randn(64, 40))
    few, many = torch.randn(2047, 40), torch.randn(2048, 40)
    assert lz.which("linear", few, packed).kernel_id.startswith("lz_cpu.linear_packed")
    assert lz.which("linear", many, packed).kernel_id == "torch.linear_packed.many_rows"
    assert lz.which("linear_packed", many, packed, activation="silu").kernel_id.startswith("lz_cpu.linear_packed")
    torch.testing.assert_close(lz.linear(many, packed), F.linear(many, packed.unpack()))
    lz.configure(batch_invariant=True)
    try:
        assert lz.which("linear", many, packed).kernel_id.startswith("lz_cpu.linear_packed")
    finally:
        lz.configure(batch_invariant=None)


def test_out_is_written() -> None:
    x, weight, out = torch.randn(3, 8), torch.randn(4, 8), torch.empty(3, 4)
    assert lz.linear(x, lz.pack(weight), out=out) is out
    torch.testing.assert_close(out, F.linear(x, weight))


def test_gradients_flow_to_the_input_and_the_bias() -> None:
    x, weight, bias = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8), torch.randn(4, requires_grad=True)
    lz.linear(x, lz.pack(weight), bias).square().sum().backward()
    wanted = torch.autograd.grad(F.linear(x, weight, bias).square().sum(), (x, bias))
    torch.testing.assert_close((x.grad, bias.grad), wanted)


def test_autocast_casts_the_product() -> None:
    x, weight = torch.randn(3, 40), torch.randn(4, 40)
    with torch.autocast("cpu", torch.bfloat16):
        got = lz.linear(x, lz.pack(weight))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), F.linear(x, weight), rtol=3e-2, atol=2e-1)


def test_torch_compile_traces_it() -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(4, 8), torch.randn(4)
    packed = lz.pack(weight)
    function = torch.compile(lambda x: F.relu(lz.linear(x, packed, bias)), backend="eager", fullgraph=True)
    torch.testing.assert_close(function(x), F.relu(F.linear(x, weight, bias)))


WRONG: list[tuple[str, Any, str, tuple[str, ...]]] = [
    ("a list", lambda: lz.pack([[1.0]]), "NOT_A_TENSOR", ("list",)),
    ("a vector", lambda: lz.pack(torch.ones(4)), "WRONG_RANK", ("[4]", "out_features")),
    ("integers", lambda: lz.pack(torch.ones(4, 4, dtype=torch.int32)), "WRONG_DTYPE", ("int32", "bfloat16")),
    ("another device", lambda: lz.pack(torch.ones(4, 4, device="meta")), "WRONG_DEVICE", ("meta", "CPU")),
    ("features", lambda: lz.linear(torch.ones(2, 5), lz.pack(torch.ones(3, 4))), "WRONG_SHAPE", ("weight", "4", "5")),
    (
        "another dtype",
        lambda: lz.linear(torch.ones(2, 4, dtype=torch.bfloat16), lz.pack(torch.ones(3, 4))),
        "MIXED_DTYPES",
        ("weight", "float32", "bfloat16"),
    ),
    (
        "the bias",
        lambda: lz.linear(torch.ones(2, 4), lz.pack(torch.ones(3, 4)), torch.ones(4)),
        "WRONG_SHAPE",
        ("bias",),
    ),
]


@pytest.mark.parametrize(("call", "code", "words"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_mistakes_are_named(call: Any, code: str, words: tuple[str, ...]) -> None:
    with pytest.raises(lz.LayerZeroError) as raised:
        call()
    assert raised.value.code == code and raised.value.hint
    assert all(word in str(raised.value) for word in words), str(raised.value)


#: Ways to hand a packed weight on: each has to compare the features itself.
CALLS: dict[str, Any] = {
    "linear": lz.linear,
    "linear_packed": lz.linear_packed,
    "by name": lambda x, packed: lz.linear(input=x, weight=packed),
    "which": lambda x, packed: lz.which("linear", x, packed),
    "explain": lambda x, packed: lz.explain("linear", x=x, weight=packed),
    "run_kernel": lambda x, packed: lz.run_kernel("torch.linear_packed", x, packed),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_input_of_other_features_is_refused(dtype: torch.dtype, call: Any) -> None:
    """Also one of the padding's width: bfloat16 is padded to 32 features, which the blocks cannot tell from the weight's."""
    packed = lz.pack(torch.randn(8, 30).to(dtype))
    call(torch.randn(2, 30).to(dtype), packed)
    for features in (0, 1, 17, 29, 31, 32, 64):
        with pytest.raises(lz.InvalidCallError) as raised:
            call(torch.randn(2, features).to(dtype), packed)
        assert raised.value.code == "WRONG_SHAPE" and "30" in raised.value.hint
        assert f"the input has {features} features, the packed weight takes 30" in str(raised.value)


def test_torch_compile_refuses_an_input_of_other_features() -> None:
    packed = lz.pack(torch.randn(8, 30).bfloat16())
    function = torch.compile(lambda x: lz.linear(x, packed), backend="eager")
    with pytest.raises(lz.InvalidCallError, match="the input has 17 features, the packed weight takes 30"):
        function(torch.randn(2, 17).bfloat16())


def test_an_input_that_is_no_tensor_is_refused_as_ever() -> None:
    packed = lz.pack(torch.randn(8, 30))
    for wrong in ([1.0], None, torch.tensor(1.0)):
        with pytest.raises(lz.LayerZeroError):
            lz.linear(wrong, packed)
