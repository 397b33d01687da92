# mypy: allow-untyped-calls
"""The operators `torch.ops.layerzero.*`: torch's own checks of each, their schemas, and what they give without data."""

import inspect
from collections.abc import Callable
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero.integrations.torch_operators.torch_ops import call_traced
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.optests.generate_tests import DEFAULT_TEST_UTILS
from torch_cases import (
    BY_ID,
    CASES,
    EVERY_FUNCTION,
    IDS,
    Arguments,
    Case,
    as_tuple,
    assert_right,
    copied,
    expected,
    run,
)


def operator_arguments(case: Case, n: int = 5) -> Arguments:
    """Arguments as the operator takes them: a window is a list, tensors want gradients where they can have them."""
    args, kwargs = copied(case.make(n))
    if isinstance(kwargs.get("window"), int):
        kwargs["window"] = [kwargs["window"]]
    values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    for at in case.grads:
        values[at] = values[at].clone().requires_grad_()
    return tuple(values[i] for i in range(len(args))), {name: values[name] for name in kwargs}


def traced(case: Case) -> Callable[..., Any]:
    """The call as a graph makes it."""
    return lambda *args, **kwargs: call_traced(case.function, args, kwargs)


def moved(arguments: Arguments, move: Callable[[Tensor], Tensor]) -> Arguments:
    """Arguments with every tensor replaced."""
    args, kwargs = arguments
    change = lambda value: move(value) if isinstance(value, Tensor) else value
    return tuple(map(change, args)), {name: change(value) for name, value in kwargs.items()}


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_opcheck(case: Case) -> None:
    args, kwargs = operator_arguments(case)
    torch.library.opcheck(getattr(torch.ops.layerzero, case.function), args, kwargs)


@pytest.mark.parametrize("case", [c for c in EVERY_FUNCTION if c.grads], ids=lambda case: case.function)
def test_opcheck_of_the_backward(case: Case) -> None:
    backward = getattr(torch.ops.layerzero, f"{case.function}_backward").default
    results = as_tuple(run(case, case.call))
    names = [argument.name for argument in backward._schema.arguments][len(results) + 1 :]
    args, kwargs = moved(operator_arguments(case), Tensor.detach)
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    wanted = {names[at] if isinstance(at, int) else at for at in case.grads}
    tensors = [argument.name for argument in backward._schema.arguments if "Tensor" in str(argument.type)][
        len(results) :
    ]
    mask = [name in wanted for name in tensors]
    torch.library.opcheck(backward, (*(torch.ones_like(r) for r in results), mask), values)


FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("int8", {"zero_point": True}),
    ("int8", {"granularity": "per_channel"}),
    ("int4", {"granularity": "blockwise"}),
    ("fp8_e4m3", {}),
    ("fp8_e5m2", {"granularity": "per_channel"}),
    ("mxfp4", {"granularity": "blockwise"}),
    ("nvfp4", {"granularity": "blockwise"}),
]


@pytest.mark.parametrize(("dtype", "options"), FORMATS, ids=lambda value: value if isinstance(value, str) else "")
def test_opcheck_of_every_format(dtype: str, options: dict[str, Any]) -> None:
    rows = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    # torch compares tensors by arithmetic that 8-bit floats do not have.
    checks = ("test_autograd_registration", "test_faketensor") if dtype.startswith("fp8") else DEFAULT_TEST_UTILS
    torch.library.opcheck(torch.ops.layerzero.quantize, (rows, dtype), options, test_utils=checks)
    values, scales, zero_points = lz.quantize(rows, dtype, **options)
    options = {name: value for name, value in options.items() if name == "granularity"}
    if values.dtype == torch.uint8:
        options["format"] = dtype
    offsets = zero_points if dtype == "int8" else None
    torch.library.opcheck(torch.ops.layerzero.dequantize, (values, scales, offsets), options, test_utils=checks)


@pytest.mark.parametrize("case", EVERY_FUNCTION, ids=lambda case: case.function)
def test_arguments_are_the_functions_in_its_order(case: Case) -> None:
    own = [a.name for a in getattr(torch.ops.layerzero, case.function).default._schema.arguments]
    # What `return_lse` asks for is another operator.
    signature = inspect.signature(getattr(lz, case.function))
    public = [name for name in signature.parameters if name not in ("out", "return_lse")]
    # Where a graph carries its seed, the default layout and what its kernel was chosen by along.
    assert [name for name in own if name not in ("seed_tensor", "default_layout", "lowering")] == public


@pytest.mark.parametrize("case", EVERY_FUNCTION, ids=lambda case: case.function)
def test_strides_reach_the_operator_as_the_program_made_them(case: Case) -> None:
    # They decide which kernels are legal.
    assert torch.Tag.needs_exact_strides in getattr(torch.ops.layerzero, case.function).default.tags


@pytest.mark.parametrize("name", ["attention", "cross_attention", "sample_topk", "sample_topp", "speculative_verify"])
def test_operators_that_draw_are_known_to(name: str) -> None:
    assert torch.Tag.nondeterministic_seeded in getattr(torch.ops.layerzero, name).default.tags


def test_operators_that_do_not_draw_are_pure() -> None:
    assert torch.Tag.nondeterministic_seeded not in torch.ops.layerzero.rms_norm.default.tags


@pytest.mark.parametrize(("name", "updated"), [("kv_append", [2, 3]), ("kv_compact", [0, 1])])
def test_updated_tensors_are_declared(name: str, updated: list[int]) -> None:
    schema = getattr(torch.ops.layerzero, name).default._schema
    assert [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write] == updated


def test_registering_again_changes_nothing() -> None:
    from layerzero import integrations
    from layerzero.integrations.torch_operators import torch_ops

    before = torch.ops.layerzero.gelu.default
    integrations.install()
    torch_ops.register()
    torch_ops.register_tracing()
    assert torch.ops.layerzero.gelu.default is before


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_fake_tensors_give_fake_results_of_the_right_shape(case: Case) -> None:
    real = run(case, traced(case))
    with FakeTensorMode() as mode:
        args, kwargs = moved(case.make(5), mode.from_tensor)
        fake = (*as_tuple(case.call(*args, **kwargs)), *(args[at] for at in case.updates))
    assert all(isinstance(tensor, FakeTensor) for tensor in fake)
    assert [(f.shape, f.stride(), f.dtype) for f in fake] == [(r.shape, r.stride(), r.dtype) for r in real]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_meta_tensors_give_meta_results_of_the_right_shape(case: Case) -> None:
    args, kwargs = copied(case.make(5))
    real = as_tuple(case.call(*args, **kwargs))
    args, kwargs = moved(case.make(5), lambda tensor: tensor.to("meta"))
    meta = as_tuple(case.call(*args, **kwargs))
    assert all(tensor.is_meta for tensor in meta)
    assert [(m.shape, m.dtype) for m in meta] == [(r.shape, r.dtype) for r in real]


WRONG: list[tuple[str, tuple[Any, ...]]] = [
    ("linear", ((2, 5), (3, 4))),
    ("linear", ((2, 4), (4,))),
    ("gelu", ((),)),
    ("rms_norm", ((2, 4), (5,))),
    ("silu_mul", ((2, 4), (3, 4))),
    ("attention", ((1, 5, 2, 8), (1, 5, 2, 4), (1, 5, 2, 8))),
    ("attention", ((5, 2, 8), (5, 2, 8), (5, 2, 8))),
    ("embedding", ((3,), (3,))),
    ("quantize", ((),)),
]


@pytest.mark.parametrize(("name", "shapes"), WRONG)
def test_wrong_shapes_are_refused_without_data(name: str, shapes: tuple[Any, ...]) -> None:
    tensors: list[Any] = [torch.empty(shape, device="meta") for shape in shapes]
    if name == "embedding":
        tensors[0] = tensors[0].long()
    if name == "quantize":
        tensors.append("int8")
    with pytest.raises(lz.InvalidCallError, match=name):
        getattr(lz, name)(*tensors)


def test_shapes_are_those_of_the_calls_layout() -> None:
    key = torch.empty(3, 2, 64, device="meta")
    slots = torch.empty(3, dtype=torch.int64, device="meta")
    heads_first = [torch.empty(8, 2, 16, 64, device="meta") for _ in range(2)]
    lz.kv_append(key, key, *heads_first, slots, layout="HND")
    with lz.layout("HND"):
        lz.kv_append(key, key, *heads_first, slots)
    with pytest.raises(lz.InvalidCallError, match="'key_cache' has shape"):
        lz.kv_append(key, key, *heads_first, slots)


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (2, 4, 5, 7), (1, 1, 1, 7), (2, 1, 5, 7)])
def test_masks_broadcast_without_data(shape: tuple[int, ...]) -> None:
    query, key = torch.empty(2, 5, 4, 8, device="meta"), torch.empty(2, 7, 4, 8, device="meta")
    mask = torch.empty(shape, dtype=torch.bool, device="meta")
    assert lz.attention(query, key, key, causal=False, attn_mask=mask).shape == query.shape


@pytest.mark.parametrize("shape", [(5, 1), (4, 7), (2, 3, 5, 7), (5, 5, 7)])
def test_masks_of_wrong_shapes_are_refused_without_data(shape: tuple[int, ...]) -> None:
    query, key = torch.empty(2, 5, 4, 8, device="meta"), torch.empty(2, 7, 4, 8, device="meta")
    mask = torch.empty(shape, dtype=torch.bool, device="meta")
    with pytest.raises(lz.InvalidCallError, match="'attn_mask' has shape"):
        lz.attention(query, key, key, causal=False, attn_mask=mask)


def test_the_tensors_given_say_which_operation_it_is() -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    nope, pe = meta(3, 4, 32), meta(3, 4, 8)
    assert lz.mla_attention(nope, pe, meta(5, 32), meta(5, 8), scale=1.0).shape == nope.shape
    tables, lengths = meta(3, 2, dtype=torch.int32), meta(3, dtype=torch.int32)
    pages = {"block_tables": tables, "context_lens": lengths, "scale": 1.0}
    assert lz.mla_attention(nope, pe, meta(6, 16, 32), meta(6, 16, 8), causal=False, **pages).shape == nope.shape
    with pytest.raises(lz.InvalidCallError, match="'ckv' has shape"):
        lz.mla_attention(nope, pe, meta(6, 16, 32), meta(6, 16, 8), scale=1.0)


def test_wrong_names_are_refused_without_data() -> None:
    rows = torch.empty(2, 64, device="meta")
    with pytest.raises(lz.InvalidCallError, match="int9"):
        lz.quantize(rows, "int9")
    with pytest.raises(lz.InvalidCallError, match="int8"):
        lz.dequantize(rows.to(torch.int8), rows[:1, :1], dtype="int8")
    with pytest.raises(lz.InvalidCallError, match="float dtype"):
        lz.gelu(rows.int())


def test_results_share_no_memory_with_arguments() -> None:
    for case in (BY_ID["gelu"], BY_ID["rope"], BY_ID["fused_add_rms_norm"], BY_ID["quantize-given-scale"]):
        args, kwargs = operator_arguments(case)
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        results = as_tuple(getattr(torch.ops.layerzero, case.function)(*args, **kwargs))
        assert given.isdisjoint(result.untyped_storage().data_ptr() for result in results)


def test_results_are_contiguous_where_the_kernel_gives_a_view() -> None:
    projected = [torch.randn(2, 5, 4, 8).transpose(1, 2) for _ in range(3)]
    assert torch.ops.layerzero.attention(*projected, layout="BHSD").is_contiguous()


def test_a_given_scale_is_given_back_per_group() -> None:
    rows = torch.randn(4, 32)
    for scale in (torch.tensor([0.5]), torch.rand(4), torch.rand(4, 1)):
        values, scales, offsets = torch.ops.layerzero.quantize(rows, "int8", scale, "per_channel")
        assert_right((values,), (lz.quantize(rows, "int8", scale, granularity="per_channel"),))
        assert torch.equal(scales, scale.reshape(-1, 1).expand(4, 1))
        assert not offsets.any() and offsets.dtype == torch.int32


def test_every_public_function_has_an_operator() -> None:
    from layerzero import _native

    for function in _native.functions():
        assert hasattr(torch.ops.layerzero, function["name"])


def test_layer_norm_refuses_weights_of_another_shape() -> None:
    rows, weight = torch.randn(2, 4, 8), torch.randn(8, 4)
    with pytest.raises(lz.InvalidCallError, match="'weight' has shape"):
        torch.ops.layerzero.layer_norm(rows, [4, 8], weight)


def test_layer_norm_refuses_a_shape_that_is_not_the_inputs() -> None:
    rows = torch.randn(3, 4, 8)
    for shape in ([8, 4], [3], []):
        with pytest.raises(lz.InvalidCallError, match="normalized_shape"):
            torch.ops.layerzero.layer_norm(rows, shape)


def test_spec_calls_work() -> None:
    query, key, value = BY_ID["attention"].make(5)[0]
    for causal in (True, False):
        given = torch.ops.layerzero.attention(query, key, value, scale=0.3, causal=causal)
        assert_right((given,), (lz.attention(query, key, value, causal, 0.3),))
    assert_right((torch.ops.layerzero.attention(query, key, value),), expected(BY_ID["attention"]))


def test_a_function_without_an_operator_says_what_it_lacks() -> None:
    with pytest.raises(lz.UnsupportedTensorError, match="layerzero.nothing has no torch operator") as caught:
        call_traced("nothing", (torch.ones(2),), {})
    assert "outside of tracing" in (caught.value.hint or "")
