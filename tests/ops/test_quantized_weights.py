"""`lz.pack(weight, dtype=...)`: weights of 8-bit and 4-bit integers with scales, every kernel, against float64."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import layerzero as lz
import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: The largest error, of the largest sum of absolute products: sums are float32, results are rounded to the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
OP = "mlp.linear.quantized"
ISAS = ("", ".avx2", ".avx512", ".amx")
#: The largest integers.
MOST = {"int8": 127, "int4": 7}
GROUPS = (None, 32, 64, 128, 256)
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers around 1, in memory of their own with a gap after each row."""
    make = torch.Generator().manual_seed(seed)
    padded = torch.randn(*shape[:-1], shape[-1] + seed % 3, generator=make).to(dtype)
    return padded[..., : shape[-1]]


@pytest.fixture(params=[*(f"lz_cpu.linear_{k}{isa}" for k in MOST for isa in ISAS), "torch.linear_quantized"])
def kernel(restored: None, request: pytest.FixtureRequest) -> Iterator[str]:
    """Each kernel in turn, as the one that serves; those this CPU cannot run are skipped."""
    name = request.param
    listed = {kernel.kernel_id: kernel.available for kernel in lz.list_kernels()}
    if not listed[name]:
        pytest.skip(f"this CPU lacks the instructions of {name}")
    lz.force_kernel(OP, name)
    yield name
    lz.unforce_kernel(OP)


def kinds(kernel: str) -> tuple[str, ...]:
    """The integers a kernel takes."""
    return tuple(kind for kind in MOST if kernel.startswith(("torch.", f"lz_cpu.linear_{kind}")))


def dtypes(kernel: str) -> tuple[torch.dtype, ...]:
    """The inputs a kernel takes."""
    return (torch.bfloat16,) if kernel.endswith(".amx") else DTYPES


def enough(kernel: str, rows: int) -> int:
    """So many rows, or as many as a kernel takes at least."""
    return max(rows, 8) if kernel.endswith(".amx") else rows


def check(x: Tensor, packed: lz.PackedWeight, bias: Tensor | None, activation: str = "none") -> None:
    """A layer gives what float64 gives for integer · scale."""
    if activation == "none":
        got = lz.linear(x, packed, bias)
    else:
        got = lz.linear_quantized(x, packed, bias, activation=activation)
    assert packed.scales is not None
    answer = reference.linear_quantized(
        x.double().numpy(),
        packed.blocks.numpy(),
        None if bias is None else bias.double().numpy(),
        scales=packed.scales.double().numpy(),
        out_features=packed.out_features,
        interleave=packed.interleave,
        group_size=packed.group,
        activation=activation,
    )
    assert (tuple(got.shape), got.dtype) == (answer.values.shape, x.dtype)
    size = F.linear(x.double().abs(), packed.unpack().double().abs()).max().item() if got.numel() else 1.0
    torch.testing.assert_close(
        got.double(),
        torch.from_numpy(np.asarray(answer.values)),
        rtol=TOLERANCE[x.dtype],
        atol=TOLERANCE[x.dtype] * max(size, 1.0) / 8,
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 12, 13, 16, 17, 31, 32, 33])
def test_every_kernel_is_right_around_the_edges_of_its_tiles(kernel: str, rows: int) -> None:
    sizes = ((1, 1), (31, 31), (32, 32), (33, 33), (127, 40), (513, 65))
    for kind in kinds(kernel):
        for dtype in dtypes(kernel):
            for i, (ins, outs) in enumerate(sizes):
                packed = lz.pack(drawn(2, outs, ins), dtype=kind, group=GROUPS[(rows + i) % len(GROUPS)])
                bias = drawn(3, outs, dtype=dtype) if outs % 2 else None
                check(drawn(rows, enough(kernel, rows), ins, dtype=dtype), packed, bias)


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_every_kernel_is_right_with_panels_side_by_side_and_in_groups(kernel: str, group: int | None) -> None:
    """Few rows are computed with up to four panels of 32 outputs at a time, many with groups of 16 panels, in chunks of up to
    264 rows. The input features are no multiple of the group."""
    for kind in kinds(kernel):
        for rows, ins, outs in ((1, 530, 33), (1, 40, 129), (2, 530, 97), (3, 40, 161), (6, 40, 64), (265, 1030, 545)):
            dtype = dtypes(kernel)[rows % len(dtypes(kernel))]
            packed = lz.pack(drawn(2, outs, ins), dtype=kind, group=group)
            check(drawn(rows, enough(kernel, rows), ins, dtype=dtype), packed, drawn(3, outs, dtype=dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_part_of_every_kernel(kernel: str, activation: str) -> None:
    for kind in kinds(kernel):
        for dtype in dtypes(kernel):
            packed = lz.pack(drawn(1, 50, 40) / 6, dtype=kind)
            check(drawn(0, enough(kernel, 5), 40, dtype=dtype), packed, drawn(2, 50, dtype=dtype), activation)


def test_rows_and_columns_may_be_missing(kernel: str) -> None:
    dtype = dtypes(kernel)[0]
    for kind in kinds(kernel):
        for rows, ins, outs in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
            for group in (None, 32):
                packed = lz.pack(torch.randn(outs, ins), dtype=kind, group=group)
                check(torch.randn(enough(kernel, rows), ins).to(dtype), packed, torch.randn(outs).to(dtype))


def test_what_is_not_finite_stays_in_its_row(kernel: str) -> None:
    dtype = dtypes(kernel)[0]
    for kind in kinds(kernel):
        packed = lz.pack(torch.ones(35, 33), dtype=kind)
        for value in (float("nan"), float("inf"), float("-inf")):
            x = torch.ones(14, 33, dtype=dtype)
            x[13, 32] = value
            got = lz.linear(x, packed)
            assert got[:13].isfinite().all()
            want = torch.full((35,), value, dtype=dtype)
            torch.testing.assert_close(got[13], want, rtol=0, atol=0, equal_nan=True)


def test_inputs_of_any_strides_are_right(kernel: str) -> None:
    dtype = dtypes(kernel)[0]
    base = torch.randn(6, 24, 5).to(dtype)
    far = torch.zeros(9, 1 << 18, dtype=dtype)[:, :24]
    far.copy_(torch.randn(9, 24))
    for kind in kinds(kernel):
        packed = lz.pack(drawn(1, 40, 24), dtype=kind)
        turned = base.transpose(1, 2)
        for x in (turned, turned[::2], base.permute(2, 0, 1), base[:, :, 0].expand(4, 6, 24), far):
            check(x, packed, None)


def test_a_row_does_not_depend_on_the_others(kernel: str) -> None:
    if kernel.startswith("torch."):
        pytest.skip("promises nothing")
    for kind in kinds(kernel):
        for dtype in dtypes(kernel):
            x, packed = torch.randn(300, 700).to(dtype), lz.pack(torch.randn(145, 700), dtype=kind)
            together = lz.linear(x, packed)
            for rows in {enough(kernel, rows) for rows in (1, 2, 3, 12, 16, 29, 265)}:
                assert torch.equal(lz.linear(x[:rows], packed), together[:rows])


def test_more_rows_of_bfloat16_are_another_kernels_unless_results_must_not_depend_on_them() -> None:
    amx = {kernel.kernel_id: kernel.available for kernel in lz.list_kernels()}["lz_cpu.linear_int8.amx"]
    packed = lz.pack(torch.randn(64, 40), dtype="int8")
    few, many = torch.randn(7, 40).bfloat16(), torch.randn(8, 40).bfloat16()
    one = lz.which("linear", few, packed).kernel_id
    assert not one.endswith(".amx")
    assert lz.which("linear", many, packed).kernel_id == ("lz_cpu.linear_int8.amx" if amx else one)
    lz.configure(batch_invariant=True)
    try:
        assert lz.which("linear", many, packed).kernel_id == one
    finally:
        lz.configure(batch_invariant=None)


# --- what is packed ---------------------------------------------------------------------------------------------------


def integers_of(packed: lz.PackedWeight) -> np.ndarray:
    """The integers by output and input feature, read by the definition."""
    outs, ins = packed.shape
    blocks, found = packed.blocks.numpy(), np.zeros((outs, ins), dtype=np.int64)
    for n in range(outs):
        for k in range(ins):
            at = k // 2 if packed.kind == "int4" else k
            number = int(blocks[n // 32, at // packed.interleave, n % 32, at % packed.interleave])
            if packed.kind == "int4":
                number = number >> 4 * (k % 2) & 15
                number -= 16 * (number >= 8)
            found[n, k] = number
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("kind", MOST)
@pytest.mark.parametrize("shape", [(1, 1), (33, 31), (40, 130), (0, 3), (3, 0)], ids=str)
def test_weights_are_rounded_to_the_nearest_integer(
    shape: tuple[int, int], kind: str, group: int | None, dtype: torch.dtype
) -> None:
    weight = torch.randn(*shape).to(dtype)
    if 0 not in shape:
        weight[-1] = 0.0
    packed = lz.pack(weight, dtype=kind, group=group)
    width = packed.group or max(shape[1], 1)
    assert packed.group == {None: {"int8": 0, "int4": 64}[kind]}.get(group, group)
    integers, w = integers_of(packed), weight.double().numpy()
    assert packed.scales is not None
    scales = packed.scales.double().numpy()
    for n in range(shape[0]):
        for first in range(0, shape[1], width):
            piece = slice(first, first + width)
            scale = scales[n // 32, first // width, n % 32]
            assert scale == np.float32(np.abs(w[n, piece]).max()) / np.float32(MOST[kind])
            assert np.abs(integers[n, piece]).max() == (MOST[kind] if scale else 0)
            assert (np.abs(w[n, piece] - scale * integers[n, piece]) <= 0.5001 * scale).all()
    unpacked = packed.unpack()
    assert unpacked.shape == shape and unpacked.dtype == torch.float32
    wide = np.repeat(scales, width, 1)[:, : shape[1]].transpose(0, 2, 1).reshape(len(scales) * 32, shape[1])[: shape[0]]
    np.testing.assert_allclose(unpacked.numpy(), integers * wide, rtol=1e-6)


def test_large_weights_are_rounded_piece_by_piece() -> None:
    weight = torch.randn(2100, 70)
    packed = lz.pack(weight, dtype="int4", group=32)
    for first in (0, 1024, 2048):
        alone = lz.pack(weight[first : first + 1024], dtype="int4", group=32)
        assert torch.equal(alone.unpack(), packed.unpack()[first : first + 1024])


def test_a_packed_weight_says_what_it_is() -> None:
    weight = torch.nn.Linear(200, 33).weight
    packed = lz.pack(weight, dtype="int8")
    assert (packed.kind, packed.format, packed.group) == ("int8", "blocked_32x1", 0)
    # Two blocks of 32 outputs: 200 bytes and a scale of four bytes for each output.
    assert packed.nbytes == 64 * 200 + 64 * 4
    assert repr(packed) == "PackedWeight(33x200 int8, blocked_32x1, a scale for each output, 13,056 bytes)"
    packed = lz.pack(weight, dtype="int4", group=32)
    assert (packed.kind, packed.format, packed.group) == ("int4", "blocked_32x8", 32)
    # 200 inputs are padded to 256 of half a byte; seven groups.
    assert packed.nbytes == 64 * 128 + 64 * 7 * 4
    assert repr(packed) == "PackedWeight(33x200 int4, blocked_32x8, a scale for 32 inputs, 9,984 bytes)"
    assert (packed.out_features, packed.in_features, packed.device.type) == (33, 200, "cpu")


def test_packed_weights_are_copied_and_pickled() -> None:
    packed = lz.pack(torch.randn(5, 70), dtype="int4", group=32)
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert torch.equal(other.unpack(), packed.unpack()) and other.blocks is not packed.blocks


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MOST)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_selection_names_the_operation(kind: str, dtype: torch.dtype) -> None:
    x, packed = torch.randn(2, 64).to(dtype), lz.pack(torch.randn(4, 64), dtype=kind)
    assert lz.which("linear", x, packed).op == OP
    assert lz.which("linear", x, packed).kernel_id.startswith(f"lz_cpu.linear_{kind}")
    text = str(lz.explain("linear", x, weight=packed))
    assert OP in text and "torch.linear_quantized" in text
    other = next(k for k in MOST if k != kind)
    assert not lz.validate(f"lz_cpu.linear_{other}", x, packed).valid
    assert lz.run_kernel("torch.linear_quantized", x, packed).shape == (2, 4)


def test_a_group_no_native_kernel_has_is_torchs() -> None:
    scales = torch.rand(1, 7, 32)
    call = {"scales": scales, "out_features": 4, "group_size": 3}
    x, weight = torch.randn(2, 20), torch.randint(-9, 9, (1, 20, 32, 1), dtype=torch.int8)
    assert lz.which("linear_quantized", x, weight, **call).kernel_id == "torch.linear_quantized"
    wide = (weight[0, :, :4, 0] * scales[0, :, :4].repeat_interleave(3, 0)[:20]).t()
    torch.testing.assert_close(lz.linear_quantized(x, weight, **call), F.linear(x, wide))


def test_out_is_written() -> None:
    x, packed, out = torch.randn(3, 8), lz.pack(torch.randn(4, 8), dtype="int8"), torch.empty(3, 4)
    assert lz.linear(x, packed, out=out) is out
    torch.testing.assert_close(out, F.linear(x, packed.unpack()))


@pytest.mark.parametrize("kind", MOST)
def test_gradients_flow_to_the_input_and_the_bias(kind: str) -> None:
    x, bias = torch.randn(3, 8, requires_grad=True), torch.randn(4, requires_grad=True)
    packed = lz.pack(torch.randn(4, 8), dtype=kind)
    lz.linear(x, packed, bias).square().sum().backward()
    wanted = torch.autograd.grad(F.linear(x, packed.unpack(), bias).square().sum(), (x, bias))
    torch.testing.assert_close((x.grad, bias.grad), wanted)


def test_autocast_casts_the_product_and_keeps_the_scales() -> None:
    x, packed = torch.randn(3, 40), lz.pack(torch.randn(4, 40), dtype="int8")
    with torch.autocast("cpu", torch.bfloat16):
        got = lz.linear(x, packed)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), F.linear(x, packed.unpack()), rtol=3e-2, atol=2e-1)


@pytest.mark.parametrize("kind", MOST)
def test_torch_compile_traces_it(kind: str) -> None:
    x, bias = torch.randn(3, 8), torch.randn(4)
    packed = lz.pack(torch.randn(4, 8), dtype=kind)
    function = torch.compile(lambda x: F.relu(lz.linear(x, packed, bias)), backend="eager", fullgraph=True)
    torch.testing.assert_close(function(x), F.relu(F.linear(x, packed.unpack(), bias)))


ONES, NOT_FINITE = torch.ones(3, 40), torch.full((3, 40), float("nan"))
WRONG: list[tuple[str, Any, str, tuple[str, ...]]] = [
    ("a list", lambda: lz.pack([[1.0]], dtype="int8"), "NOT_A_TENSOR", ("list",)),
    ("a vector", lambda: lz.pack(torch.ones(4), dtype="int8"), "WRONG_RANK", ("[4]", "out_features")),
    ("integers", lambda: lz.pack(ONES.int(), dtype="int8"), "WRONG_DTYPE", ("int32", "bfloat16")),
    ("NaN", lambda: lz.pack(NOT_FINITE, dtype="int8"), "BAD_DATA", ("finite",)),
    ("other integers", lambda: lz.pack(ONES, dtype="int3"), "BAD_PARAM", ("'int3'", "'int4'")),
    ("a group of floats", lambda: lz.pack(ONES, group=32), "BAD_PARAM", ("32", "rounded")),
    ("another group", lambda: lz.pack(ONES, dtype="int4", group=48), "BAD_PARAM", ("48", "32, 64, 128, 256")),
    ("no group", lambda: lz.pack(ONES, dtype="int4", group=0), "BAD_PARAM", ("0", "32, 64, 128, 256")),
    ("a yes", lambda: lz.pack(ONES, dtype="int4", group=True), "BAD_PARAM", ("True",)),
    (
        "features",
        lambda: lz.linear(torch.ones(2, 5), lz.pack(ONES, dtype="int8")),
        "WRONG_SHAPE",
        ("5 features", "takes 40"),
    ),
    (
        "the padding's features",
        lambda: lz.linear(torch.ones(2, 128), lz.pack(ONES, dtype="int4")),
        "WRONG_SHAPE",
        ("128 features", "takes 40"),
    ),
    (
        "the bias",
        lambda: lz.linear(torch.ones(2, 40), lz.pack(ONES, dtype="int8"), torch.ones(4)),
        "WRONG_SHAPE",
        ("bias",),
    ),
    (
        "scales of floats",
        lambda: lz.linear_quantized(torch.ones(2, 40), lz.pack(ONES), scales=torch.ones(1, 1, 32)),
        "BAD_ARGUMENTS",
        ("scales",),
    ),
    (
        "other scales",
        lambda: lz.linear_quantized(torch.ones(2, 40), lz.pack(ONES, dtype="int8"), scales=torch.ones(1, 2, 32)),
        "WRONG_SHAPE",
        ("scales", "2"),
    ),
    (
        "a negative group",
        lambda: lz.linear_quantized(torch.ones(2, 40), lz.pack(ONES, dtype="int8"), group_size=-1),
        "BAD_PARAM",
        ("group_size",),
    ),
    (
        "no scales",
        lambda: lz.linear_quantized(torch.ones(2, 40), lz.pack(ONES, dtype="int8").blocks, out_features=3),
        "MISSING_INPUT",
        ("scales",),
    ),
]


@pytest.mark.parametrize(("call", "code", "words"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_mistakes_are_named(call: Any, code: str, words: tuple[str, ...]) -> None:
    with pytest.raises(lz.LayerZeroError) as raised:
        call()
    assert raised.value.code == code and raised.value.hint
    assert all(word in str(raised.value) for word in words), str(raised.value)
