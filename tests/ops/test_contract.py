"""The promises of the front door that hold for every call: alignment, NaN, outputs, errors, seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import layerzero
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import FUNCTIONS, everyone, kernels, memory
from strategies import filled

# Many calls here are wrong on purpose, or take their arguments from a dictionary.
lz: Any = layerzero
NAN = float("nan")


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Numbers of a normal distribution, the same every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(seq_q: int = 4, seq_k: int = 4, heads: int = 2, kv_heads: int = 2, dim: int = 8) -> dict[str, Any]:
    """BHSD."""
    return {
        "query": rand(1, heads, seq_q, dim, seed=1),
        "key": rand(1, kv_heads, seq_k, dim, seed=2),
        "value": rand(1, kv_heads, seq_k, dim, seed=3),
        "layout": "BHSD",
    }


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_nan_that_takes_part_gives_nan(name: str) -> None:
    call = qkv(seq_k=16)
    call[name][0, 0, 0, 0] = NAN
    for kernel, out in everyone("attention", **call, causal=False):
        touched = out[0, 0, 0] if name == "query" else out[0, 0] if name == "key" else out[0, 0, :, 0]
        assert touched.isnan().all(), kernel
        assert not out[0, 1].isnan().any(), kernel


def test_at_few_keys_a_nan_query_is_what_torch_makes_of_it() -> None:
    """The default is torch's own call. With fewer than 16 keys torch's kernel on the CPU may give zeros for such a query."""
    call = qkv(seq_k=8)
    call["query"][0, 0, 0, 0] = NAN
    expected = F.scaled_dot_product_attention(call["query"], call["key"], call["value"])
    out = lz.attention(**call, causal=False)
    torch.testing.assert_close(out, expected, equal_nan=True)
    assert not out[0, 0, 1:].isnan().any() and not out[0, 1].isnan().any()


@pytest.mark.parametrize("name", ["key", "value"])
def test_nan_behind_the_causal_bound_takes_no_part(name: str) -> None:
    call = qkv(seq_q=64, seq_k=64)
    call[name][0, :, -1] = NAN
    for kernel, out in everyone("attention", **call, causal=True):
        assert out[0, :, -1].isnan().any(), kernel
        # torch's own kernels and the native ones multiply what gets no weight by zero, which keeps a NaN.
        if kernel != "chosen" and not kernel.startswith(("torch.sdpa.", "lz_cpu.attention.")):
            assert not out[0, :, :-1].isnan().any(), kernel


def test_nan_takes_part_however_small_its_weight() -> None:
    """The first key's weight is too small for any float; it may be attended to all the same."""
    call: dict[str, Any] = {n: torch.full((1, 1, 3, 8), 60.0) for n in ("query", "key", "value")} | {"layout": "BHSD"}
    call["key"][:, :, 0] = -60.0
    call["value"][:, :, 0, 0] = NAN
    for kernel, out in everyone("attention", **call, causal=False):
        assert out[..., 0].isnan().all() and not out[..., 1:].isnan().any(), kernel


@pytest.mark.parametrize("spoiled", [False, True], ids=["finite", "nan"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_query_that_may_attend_to_nothing_gives_zeros(dtype: torch.dtype, spoiled: bool) -> None:
    """Even one that holds a NaN: it takes no part. torch's own call under a mask, the default, keeps that NaN."""
    allowed = torch.ones(4, 4, dtype=torch.bool)
    allowed[1] = False
    mask = allowed if dtype == torch.bool else torch.zeros(4, 4).masked_fill(~allowed, float("-inf"))
    call = qkv()
    if spoiled:
        call["query"][0, :, 1] = NAN
    for kernel, out in everyone("attention", **call, causal=False, attn_mask=mask):
        keeps = spoiled and kernel in ("chosen", "torch.sdpa.flash")
        assert out[0, :, 1].isnan().all() if keeps else (out[0, :, 1] == 0).all(), kernel
        assert out[0, :, [0, 2, 3]].abs().min() > 0, kernel


def test_queries_before_the_first_key_give_zeros() -> None:
    """Causal by a window, which may have more queries than keys."""
    for kernel, out in everyone("attention", **qkv(seq_q=5, seq_k=2), causal=False, window=(-1, 0)):
        assert (out[0, :, :3] == 0).all(), kernel
        assert out[0, :, 3:].abs().min() > 0, kernel


def test_no_keys_at_all_give_zeros() -> None:
    for kernel, out in everyone("attention", **qkv(seq_k=0), causal=False):
        assert out.shape == (1, 2, 4, 8) and (out == 0).all(), kernel


def test_causal_is_aligned_bottom_right() -> None:
    """The last query sees every key; the first of two sees all but the last."""
    call = qkv(seq_q=2, seq_k=5)
    alone = lz.attention(call["query"][:, :, :1], call["key"][:, :, :4], call["value"][:, :, :4], False, layout="BHSD")
    last = lz.attention(call["query"][:, :, 1:], call["key"], call["value"], False, layout="BHSD")
    for kernel, out in everyone("attention", **call, causal=True):
        torch.testing.assert_close(out, torch.cat([alone, last], 2), rtol=1e-5, atol=1e-5, msg=kernel)


def test_causal_is_the_default_and_not_for_cross_attention() -> None:
    call = qkv()
    torch.testing.assert_close(lz.attention(**call), lz.attention(**call, causal=True), rtol=0, atol=0)
    torch.testing.assert_close(lz.cross_attention(**call), lz.attention(**call, causal=False), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(lz.attention(**call), lz.cross_attention(**call), atol=1e-3)


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_an_explicit_layout_is_respected_though_another_is_likelier() -> None:
    call = qkv(seq_q=6, seq_k=6)
    as_bhsd = lz.attention(**call)
    flipped = {n: t.transpose(1, 2).contiguous() if isinstance(t, torch.Tensor) else t for n, t in call.items()}
    as_bshd = lz.attention(**(flipped | {"layout": "BSHD"}))
    torch.testing.assert_close(as_bshd.transpose(1, 2), as_bhsd, rtol=1e-5, atol=1e-5)
    # Two heads and six positions, read as six heads and two positions.
    other = lz.attention(**(call | {"layout": "BSHD"}))
    assert other.shape == as_bhsd.shape and not torch.allclose(other, as_bhsd, atol=1e-3)


# --- outputs ----------------------------------------------------------------------------------------------------------

SIMPLE: dict[str, Callable[[], dict[str, Any]]] = {
    "attention": qkv,
    "cross_attention": qkv,
    "embedding": lambda: {"indices": torch.tensor([[0, 3, 1]]), "weight": rand(5, 4)},
    "rope": lambda: {"input": rand(2, 3, 2, 4), "cos": rand(3, 2), "sin": rand(3, 2)},
    "alibi_bias": lambda: {"slopes": rand(3), "seq_q": 2, "seq_k": 5},
    "rms_norm": lambda: {"input": rand(3, 8), "weight": rand(8)},
    "layer_norm": lambda: {"input": rand(3, 8), "weight": rand(8), "bias": rand(8)},
    "linear": lambda: {"input": rand(3, 8), "weight": rand(4, 8), "bias": rand(4)},
    "linear_packed": lambda: {"input": rand(3, 8), "weight": rand(1, 8, 32, 1), "bias": rand(4), "out_features": 4},
    "linear_quantized": lambda: {
        "input": rand(3, 8),
        "weight": torch.ones(1, 8, 32, 1, dtype=torch.int8),
        "bias": rand(4),
        "scales": torch.ones(1, 1, 32),
        "out_features": 4,
    },
    "fused_mlp": lambda: {"input": rand(3, 8), "up_weight": rand(6, 8), "down_weight": rand(8, 6)},
    "silu_mul": lambda: {"gate": rand(3, 8), "up": rand(3, 8, seed=1)},
    "gelu": lambda: {"input": rand(3, 8)},
    "softmax": lambda: {"input": rand(3, 8)},
    "sample_topk": lambda: {"logits": rand(3, 8), "k": 3, "uniform": torch.full((3,), 0.4)},
    "sample_topp": lambda: {"logits": rand(3, 8), "p": 0.8, "uniform": torch.full((3,), 0.4)},
}


@pytest.mark.parametrize("name", SIMPLE)
def test_out_is_written_and_returned(name: str) -> None:
    call = SIMPLE[name]()
    plain = getattr(lz, name)(**call)
    for out in (filled(tuple(plain.shape), plain.dtype), filled((*plain.shape, 2), plain.dtype)[..., 1]):
        assert getattr(lz, name)(**call, out=out) is out
        torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize("fault", ["shape", "rank", "dtype"])
def test_a_wrong_out_is_refused_and_left_alone(name: str, fault: str) -> None:
    call = SIMPLE[name]()
    plain = getattr(lz, name)(**call)
    shape, dtype = list(plain.shape), plain.dtype
    if fault == "shape":
        shape[-1] += 1
    elif fault == "rank":
        shape = [1, *shape]
    else:
        dtype = torch.float64 if dtype != torch.float64 else torch.float32
    out = torch.full(shape, 7, dtype=dtype)
    with pytest.raises(lz.InvalidCallError) as caught:
        getattr(lz, name)(**call, out=out)
    assert "out" in str(caught.value)
    assert (
        str(dtype).removeprefix("torch.") in str(caught.value)
        if fault == "dtype"
        else str(shape[-1]) in str(caught.value)
    )
    assert (out == 7).all()


@pytest.mark.parametrize("name", SIMPLE)
def test_the_same_call_gives_the_same_bits(name: str) -> None:
    first, second = (getattr(lz, name)(**SIMPLE[name]()) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", [n for n in SIMPLE if n not in ("alibi_bias", "embedding")])
def test_batch_zero_gives_an_empty_result_of_the_right_shape(name: str) -> None:
    call = SIMPLE[name]()
    shared = ("weight", "bias", "scales", "cos", "sin", "up_weight", "down_weight")
    empty = {n: v[:0] if isinstance(v, torch.Tensor) and n not in shared else v for n, v in call.items()}
    out = getattr(lz, name)(**empty)
    assert out.shape == (0, *getattr(lz, name)(**call).shape[1:])


def test_numpy_in_numpy_out() -> None:
    x, w = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8), np.ones(8, dtype=np.float32)
    out = lz.rms_norm(x, w)
    assert isinstance(out, np.ndarray) and out.dtype == np.float32
    np.testing.assert_allclose(out, lz.rms_norm(torch.from_numpy(x), torch.from_numpy(w)).numpy(), rtol=1e-6)
    backwards = x[:, ::-1]
    np.testing.assert_allclose(lz.rms_norm(backwards), lz.rms_norm(backwards.copy()), rtol=1e-6)


def test_numpy_out_is_written_and_returned() -> None:
    x, out = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8), np.full((2, 8), 7, dtype=np.float32)
    assert lz.gelu(x, out=out) is out
    np.testing.assert_allclose(out, lz.gelu(x), rtol=1e-6)


def test_a_read_only_array_is_never_written() -> None:
    frozen = np.full((1, 2, 1, 4), 7, dtype=np.float32)
    frozen.flags.writeable = False
    token, slot = np.ones((1, 1, 4), dtype=np.float32), np.array([1])
    with pytest.raises(lz.LayerZeroError, match="key_cache"):
        lz.kv_append(token, token, frozen, frozen.copy(), slot)
    with pytest.raises(lz.LayerZeroError, match="out"):
        lz.gelu(token, out=frozen[0, :1])
    assert (frozen == 7).all()


def test_any_dlpack_producer_is_taken() -> None:
    class Producer:
        """Nothing but the protocol."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __dlpack__(self, **options: Any) -> Any:
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    x = rand(2, 8)
    got = lz.gelu(Producer(x))
    np.testing.assert_allclose(np.from_dlpack(got), lz.gelu(x).numpy(), rtol=1e-6)


# --- errors -----------------------------------------------------------------------------------------------------------

X = rand(2, 8)
HALF = {"query": rand(1, 2, 4, 8), "key": rand(1, 2, 4, 8, dtype=torch.float16), "value": rand(1, 2, 4, 8)}
MASK = torch.ones(4, 4, dtype=torch.bool)
INDEX = torch.tensor([0, 1], dtype=torch.int32)


def latent() -> dict[str, Any]:
    """A latent attention call."""
    return {"q_nope": rand(2, 1, 4), "q_pe": rand(2, 1, 2), "ckv": rand(3, 4), "kpe": rand(3, 2), "scale": 0.5}


WRONG: list[tuple[str, Callable[[], Any], str, tuple[str, ...]]] = [
    ("mask_and_causal", lambda: lz.attention(**qkv(), attn_mask=MASK), "ATTN_MASK_INVALID", ("attn_mask", "causal")),
    ("mixed_dtypes", lambda: lz.attention(**HALF), "MIXED_DTYPES", ("key", "float16", "query", "float32")),
    ("rank_3", lambda: lz.attention(X[None], X[None], X[None]), "WRONG_RANK", ("query", "[1, 2, 8]")),
    (
        "lengths_differ",
        lambda: lz.attention(**(qkv() | {"value": rand(1, 2, 3, 8)})),
        "WRONG_SHAPE",
        ("value", "3", "4", "key"),
    ),
    ("heads", lambda: lz.attention(**qkv(heads=3)), "GQA_HEADS_MISMATCH", ("3", "2")),
    (
        "head_dim",
        lambda: lz.attention(**(qkv() | {"key": rand(1, 2, 4, 7)})),
        "WRONG_SHAPE",
        ("key", "head_dim", "7", "8"),
    ),
    ("integers", lambda: lz.rms_norm(torch.ones(2, 8, dtype=torch.int64)), "WRONG_DTYPE", ("input", "int64")),
    (
        "mask_shape",
        lambda: lz.attention(**qkv(), causal=False, attn_mask=MASK[:, :3]),
        "WRONG_SHAPE",
        ("attn_mask", "3"),
    ),
    (
        "mask_dtype",
        lambda: lz.attention(**qkv(), causal=False, attn_mask=MASK.int()),
        "WRONG_DTYPE",
        ("attn_mask", "int32"),
    ),
    ("slopes", lambda: lz.attention(**qkv(), alibi_slopes=rand(3)), "WRONG_SHAPE", ("alibi_slopes", "3", "2")),
    ("window", lambda: lz.attention(**qkv(), window=-2), "CONSTRAINT_FAILED", ("window", "-2")),
    ("softcap", lambda: lz.attention(**qkv(), softcap=-1.0), "CONSTRAINT_FAILED", ("softcap", "-1")),
    ("dropout", lambda: lz.attention(**qkv(), dropout_p=1.0), "CONSTRAINT_FAILED", ("dropout_p", "1")),
    ("layout_of_another", lambda: lz.attention(**(qkv() | {"layout": "NHD"})), "WRONG_LAYOUT", ("NHD", "BSHD", "BHSD")),
    ("layout_unknown", lambda: lz.attention(**(qkv() | {"layout": "BSDH"})), "BAD_PARAM", ("BSDH", "BSHD")),
    ("weight_width", lambda: lz.rms_norm(X, rand(7)), "WRONG_SHAPE", ("weight", "7", "8", "input")),
    ("eps", lambda: lz.rms_norm(X, eps=-1.0), "CONSTRAINT_FAILED", ("eps", "-1")),
    ("normalized_shape", lambda: lz.layer_norm(X, (7,)), "WRONG_SHAPE", ("normalized_shape", "7", "8")),
    ("linear_features", lambda: lz.linear(X, rand(4, 7)), "WRONG_SHAPE", ("weight", "7", "8")),
    ("linear_bias", lambda: lz.linear(X, rand(4, 8), rand(5)), "WRONG_SHAPE", ("bias", "5", "4")),
    ("silu_leading", lambda: lz.silu_mul(rand(2, 3, 4), rand(3, 2, 4)), "WRONG_SHAPE", ("up", "[3, 2]", "[2, 3]")),
    ("approximate", lambda: lz.gelu(X, "erf"), "BAD_PARAM", ("approximate", "erf", "tanh")),
    (
        "activation",
        lambda: lz.fused_mlp(X, rand(4, 8), rand(8, 4), None, "swish"),
        "BAD_PARAM",
        ("activation", "swish", "silu"),
    ),
    ("causal_type", lambda: lz.attention(**qkv(), causal="yes"), "BAD_PARAM", ("causal", "yes")),
    ("scale_type", lambda: lz.attention(**qkv(), scale="big"), "BAD_PARAM", ("scale", "big")),
    ("scale_nan", lambda: lz.attention(**qkv(), scale=NAN), "BAD_PARAM", ("scale", "NaN")),
    ("k_zero", lambda: lz.sample_topk(X, 0), "CONSTRAINT_FAILED", ("k", "0")),
    ("p_zero", lambda: lz.sample_topp(X, 0.0), "CONSTRAINT_FAILED", ("p", "0")),
    ("p_above_one", lambda: lz.sample_topp(X, 1.5), "CONSTRAINT_FAILED", ("p", "1.5")),
    ("no_vocabulary", lambda: lz.sample_topk(rand(2, 0), 1), "CONSTRAINT_FAILED", ("vocab",)),
    ("uniform_shape", lambda: lz.sample_topk(X, 1, uniform=torch.zeros(3)), "WRONG_SHAPE", ("uniform", "3", "2")),
    (
        "tables",
        lambda: lz.rope(rand(1, 2, 2, 4), rand(2, 3), rand(2, 3)),
        "CONSTRAINT_FAILED",
        ("rot", "3", "head_dim", "4"),
    ),
    (
        "table_dtypes",
        lambda: lz.rope(rand(1, 2, 2, 4), rand(2, 2), rand(2, 2).half()),
        "MIXED_DTYPES",
        ("sin", "float16"),
    ),
    (
        "one_indptr",
        lambda: lz.mla_attention(**latent(), qo_indptr=INDEX),
        "CONSTRAINT_FAILED",
        ("kv_indptr", "qo_indptr"),
    ),
    ("format", lambda: lz.quantize(X, "int3"), "BAD_PARAM", ("dtype", "int3", "int4")),
    ("mxfp4_per_tensor", lambda: lz.quantize(X, "mxfp4"), "CONSTRAINT_FAILED", ("mxfp4",)),
    ("zero_point_of_floats", lambda: lz.quantize(X, "fp8_e4m3", zero_point=True), "CONSTRAINT_FAILED", ("zero_point",)),
    (
        "group_size",
        lambda: lz.quantize(X, "int8", granularity="blockwise", group_size=0),
        "CONSTRAINT_FAILED",
        ("group", "0"),
    ),
    ("seq_negative", lambda: lz.alibi_bias(rand(2), -1, 3), "BAD_PARAM", ("seq_q", "-1")),
]


@pytest.mark.parametrize(("call", "code", "named"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_wrong_call_says_what_is_wrong(call: Callable[[], Any], code: str, named: tuple[str, ...]) -> None:
    with pytest.raises(lz.InvalidCallError) as caught:
        call()
    error = caught.value
    assert error.code == code, error
    assert all(word in str(error) for word in named), error
    assert error.hint
    assert error.to_dict()["code"] == code
    assert isinstance(error, layerzero.LayerZeroError) and isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: lz.rms_norm(X, None, 1e-6, None), "positional"),
        (lambda: lz.attention(X, X, X, True, None, None), "positional"),
        (lambda: lz.rms_norm(X, wieght=X), "wieght"),
        (lambda: lz.attention(**qkv(), is_casual=True), "is_casual"),
        (lambda: lz.rms_norm(), "input"),
        (lambda: lz.attention(X, X), "value"),
        (lambda: lz.mla_attention(**{n: v for n, v in latent().items() if n != "scale"}), "scale"),
        (lambda: lz.rms_norm(X, input=X), "input"),
    ],
)
def test_arguments_that_do_not_fit_the_function_are_type_errors(call: Callable[[], Any], named: str) -> None:
    with pytest.raises(TypeError, match=named):
        call()


@pytest.mark.parametrize("value", [[[1.0, 2.0]], "text", 3.0, object()])
def test_what_is_no_tensor_is_a_type_error_that_names_it(value: Any) -> None:
    with pytest.raises(lz.ArgumentTypeError, match="input") as caught:
        lz.rms_norm(value)
    assert caught.value.code == "NOT_A_TENSOR" and type(value).__name__ in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_another_device_is_an_error() -> None:
    with pytest.raises(lz.LayerZeroError) as caught:
        lz.linear(X, torch.empty(4, 8, device="meta"))
    assert caught.value.code == "MIXED_DEVICES" and "weight" in str(caught.value)


def test_a_generator_of_another_kind_is_a_type_error() -> None:
    with pytest.raises(lz.ArgumentTypeError, match="generator"):
        lz.sample_topk(X, 2, generator=np.random.default_rng(0))


@pytest.mark.parametrize("tensor", [X.to_sparse(), X.to_mkldnn()], ids=["sparse", "mkldnn"])
def test_a_tensor_without_strides_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(lz.UnsupportedTensorError) as caught:
        lz.rms_norm(tensor)
    assert caught.value.code == "UNSUPPORTED_TENSOR" and caught.value.hint
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("name", SIMPLE)
def test_a_refused_call_touches_nothing(name: str) -> None:
    call = SIMPLE[name]()
    tensors = [v for v in call.values() if isinstance(v, torch.Tensor)]
    before = [memory(t) for t in tensors]
    with pytest.raises((lz.LayerZeroError, TypeError)):
        getattr(lz, name)(**call, unheard_of=1)
    assert [memory(t) for t in tensors] == before


# --- inspection -------------------------------------------------------------------------------------------------------


def test_every_function_of_the_interface_is_there_and_known_by_its_name() -> None:
    assert set(FUNCTIONS) <= set(lz.__all__)
    for name, function in FUNCTIONS.items():
        assert {k.kernel_id for k in lz.list_kernels(name)} == {
            k.kernel_id for k in lz.list_kernels(function.operation)
        }


@pytest.mark.parametrize("name", SIMPLE)
def test_the_chosen_kernel_is_valid_and_is_the_one_that_runs(name: str) -> None:
    call = SIMPLE[name]()
    chosen = lz.which(name, **call)
    assert lz.validate(chosen.kernel_id, **call) == (True, [])
    assert lz.explain(name, **call).chosen == chosen.kernel_id
    assert torch.equal(getattr(lz, name)(**call), lz.run_kernel(chosen.kernel_id, **call))


@pytest.mark.parametrize("kernel", kernels("attention") + kernels("attention.cross"))
def test_validate_and_run_kernel_agree_whatever_operation_the_kernel_is_for(kernel: str) -> None:
    """Calls of four operations: a kernel either takes one and runs it, or says why not."""
    for call in (qkv(), qkv(heads=4), qkv(seq_q=1), qkv(seq_q=1, heads=4)):
        valid, reasons = lz.validate(kernel, **call)
        assert valid != bool(reasons)
        if valid:
            assert lz.run_kernel(kernel, **call).shape == call["query"].shape
            continue
        with pytest.raises(lz.NoKernelFoundError) as caught:
            lz.run_kernel(kernel, **call)
        assert kernel in str(caught.value) and caught.value.failures


def test_unknown_names_are_lookup_errors_that_suggest_the_nearest() -> None:
    with pytest.raises(lz.UnknownKernelError, match="torch.rms_norm"):
        lz.run_kernel("torch.rms_nrm", X)
    with pytest.raises(lz.UnknownOperationError, match="rms_norm"):
        lz.which("rms_nrm", X)
    assert issubclass(lz.UnknownKernelError, LookupError) and issubclass(lz.UnknownOperationError, LookupError)
