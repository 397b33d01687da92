"""Calls of every public function on torch tensors, with what they must give; and that eager calls give it.

The other `test_torch_*` files run the same calls through torch's machinery.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import layerzero as lz
import torch
import torch_references as reference
from torch import Tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A call: the function, its arguments for a size, and what it gives."""

    id: str
    function: str
    # From a size, which varies where shapes are dynamic; no other size is 5, 7 or 9.
    make: Callable[[int], Arguments]
    reference: Callable[..., Any]
    # Names or places of the tensors gradients are checked for; none where no kernel has a backward.
    grads: tuple[int | str, ...] = ()
    # Places of the tensors that are updated in place.
    updates: tuple[int, ...] = ()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The public function."""
        return getattr(lz, self.function)(*args, **kwargs)


# --- calls ------------------------------------------------------------------------------------------------------------


def _made(build: Callable[[Callable[..., Tensor], int], Arguments]) -> Callable[[int], Arguments]:
    """Arguments from random tensors that are the same every time."""

    def make(n: int) -> Arguments:
        generator = torch.Generator().manual_seed(n)
        return build(lambda *shape: torch.randn(*shape, generator=generator), n)

    return make


def _dense(**options: Any) -> Callable[[int], Arguments]:
    return _made(lambda randn, n: ((randn(2, n, 4, 8), randn(2, n, 4, 8), randn(2, n, 4, 8)), options))


def _paged(randn: Callable[..., Tensor], n: int, **options: Any) -> Arguments:
    tables = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32)
    lens = torch.tensor([5, 8], dtype=torch.int32)
    return (randn(2, 4, 8), randn(n, 4, 2, 8), randn(n, 4, 2, 8), tables, lens), options


def _packed(randn: Callable[..., Tensor], n: int) -> Arguments:
    (_, *rest), _ = _paged(randn, n)
    return (randn(6, 4, 8), *rest), {"cu_seqlens_q": torch.tensor([0, 2, 6], dtype=torch.int32)}


def _varlen(randn: Callable[..., Tensor], n: int, **options: Any) -> Arguments:
    rows, keys = (torch.tensor([0, *ends], dtype=torch.int32) for ends in ([2, n + 1], [3, n + 4]))
    return (randn(n + 1, 4, 8), randn(n + 4, 2, 8), randn(n + 4, 2, 8), rows, keys), options


def _mla_paged(randn: Callable[..., Tensor], n: int) -> Arguments:
    (_, _, _, tables, lens), _ = _paged(randn, n)
    caches = randn(n, 4, 16), randn(n, 4, 8)
    return (randn(2, 4, 16), randn(2, 4, 8), *caches, 0.2), {"block_tables": tables, "context_lens": lens}


def _blocks(randn: Callable[..., Tensor], n: int) -> Arguments:
    indptr, indices = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([1, 0, 1], dtype=torch.int32)
    options = {"indptr": indptr, "indices": indices, "block_rows": n, "block_cols": 3}
    return (randn(2 * n, 4, 8), randn(6, 2, 8), randn(6, 2, 8)), options


def _variable_blocks(randn: Callable[..., Tensor], n: int) -> Arguments:
    mask = torch.tensor([[[True, False], [True, True]], [[False, True], [True, False]]])
    rows, cols = torch.tensor([[2, n - 2], [1, n - 1]]), torch.tensor([[4, 2], [3, 3]])
    options = {"block_mask": mask, "block_row_sizes": rows, "block_col_sizes": cols}
    return (randn(4, n, 8), randn(2, 6, 8), randn(2, 6, 8)), options


def _ids_of(n: int, most: int, *shape: int) -> Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(n))


def _uniform(n: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def _speculative(randn: Callable[..., Tensor], n: int) -> Arguments:
    draft, target = torch.softmax(randn(n, 3, 11), -1), torch.softmax(randn(n, 4, 11), -1)
    return (_ids_of(n, 11, n, 3), draft, target), {"uniform": _uniform(n, n, 4)}


def _append(randn: Callable[..., Tensor], n: int) -> Arguments:
    slots = torch.randperm(4 * n, generator=torch.Generator().manual_seed(n))[:n]
    slots[1] = -1
    return (randn(n, 2, 8), randn(n, 2, 8), randn(n, 4, 2, 8), randn(n, 4, 2, 8), slots), {}


CASES = [
    Case("attention", "attention", _dense(), reference.attention, (0, 1, 2)),
    Case("attention-full", "attention", _dense(causal=False, scale=0.3), reference.attention, (0, 1, 2)),
    Case(
        "attention-gqa-heads-first",
        "attention",
        _made(lambda randn, n: ((randn(2, 4, 3, 8), randn(2, 2, n, 8), randn(2, 2, n, 6)), {"layout": "BHSD"})),
        reference.attention,
        (0, 1, 2),
    ),
    Case("attention-window", "attention", _dense(window=2), reference.attention, (0, 1, 2)),
    Case("attention-window-both", "attention", _dense(causal=False, window=(2, 1)), reference.attention, (0, 1, 2)),
    Case("attention-softcap", "attention", _dense(softcap=3.0), reference.attention, (0, 1, 2)),
    Case(
        "attention-mask",
        "attention",
        _made(
            lambda randn, n: (
                (randn(2, n, 4, 8), randn(2, n, 4, 8), randn(2, n, 4, 8)),
                {"causal": False, "attn_mask": torch.ones(n, n, dtype=torch.bool).tril()},
            )
        ),
        reference.attention,
        (0, 1, 2),
    ),
    Case(
        "attention-alibi",
        "attention",
        _made(
            lambda randn, n: (
                (randn(2, n, 4, 8), randn(2, n, 4, 8), randn(2, n, 4, 8)),
                {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
            )
        ),
        reference.attention,
        (0, 1, 2),
    ),
    Case(
        "cross_attention",
        "cross_attention",
        _made(lambda randn, n: ((randn(2, 3, 4, 8), randn(2, n, 4, 8), randn(2, n, 4, 8)), {"layout": "BSHD"})),
        reference.cross_attention,
        (0, 1, 2),
    ),
    Case("varlen_attention", "varlen_attention", _made(_varlen), reference.varlen_attention, (0, 1, 2)),
    Case(
        "varlen_attention-softcap",
        "varlen_attention",
        _made(lambda randn, n: _varlen(randn, n, causal=False, softcap=3.0, scale=0.3)),
        reference.varlen_attention,
        (0, 1, 2),
    ),
    Case(
        "attention-sinks",
        "attention",
        _made(
            lambda randn, n: (
                (randn(2, n, 4, 8), randn(2, n, 2, 8), randn(2, n, 2, 8)),
                {"sinks": torch.tensor([0.5, -0.25, 1.0, 0.0])},
            )
        ),
        reference.attention,
        (0, 1, 2, "sinks"),
    ),
    Case("attention_lse", "attention_lse", _dense(), reference.attention_lse, (0, 1, 2)),
    Case("varlen_attention_lse", "varlen_attention_lse", _made(_varlen), reference.varlen_attention_lse, (0, 1, 2)),
    Case("paged_attention_lse", "paged_attention_lse", _made(_paged), reference.paged_attention_lse),
    Case(
        "merge_states",
        "merge_states",
        _made(lambda randn, n: ((randn(n, 4, 8), randn(n, 4), randn(n, 4, 8), randn(n, 4)), {})),
        reference.merge_states,
        (0, 1, 2, 3),
    ),
    Case("paged_attention", "paged_attention", _made(_paged), reference.paged_attention),
    Case("paged_attention-prefill", "paged_attention", _made(_packed), reference.paged_attention),
    Case(
        "mla_attention",
        "mla_attention",
        _made(lambda randn, n: ((randn(3, 4, 16), randn(3, 4, 8), randn(n, 16), randn(n, 8), 0.2), {})),
        reference.mla_attention,
    ),
    Case("mla_attention-paged", "mla_attention", _made(_mla_paged), reference.mla_attention),
    Case("sparse_attention-blocks", "sparse_attention", _made(_blocks), reference.sparse_attention, (0, 1, 2)),
    Case(
        "sparse_attention-variable", "sparse_attention", _made(_variable_blocks), reference.sparse_attention, (0, 1, 2)
    ),
    Case(
        "embedding",
        "embedding",
        _made(lambda randn, n: ((_ids_of(n, 11, 2, n), randn(11, 8)), {})),
        lambda indices, weight: weight[indices],
        (1,),
    ),
    Case(
        "rope",
        "rope",
        _made(lambda randn, n: ((randn(2, n, 4, 8), randn(n, 4), randn(n, 4)), {})),
        reference.rope,
        (0, 1, 2),
    ),
    Case(
        "rope-interleaved",
        "rope",
        _made(
            lambda randn, n: (
                (randn(2, 4, n, 10), randn(20, 4), randn(20, 4), True),
                {"positions": _ids_of(n, 20, n), "layout": "BHSD"},
            )
        ),
        reference.rope,
        (0, 1, 2),
    ),
    Case(
        "alibi_bias",
        "alibi_bias",
        _made(lambda randn, n: ((torch.tensor([0.5, 0.25]), 3, n), {})),
        reference.alibi_bias,
        (0,),
    ),
    Case(
        "rms_norm", "rms_norm", _made(lambda randn, n: ((randn(2, n, 16), randn(16)), {})), reference.rms_norm, (0, 1)
    ),
    Case(
        "rms_norm-plain", "rms_norm", _made(lambda randn, n: ((randn(n, 16),), {"eps": 1e-3})), reference.rms_norm, (0,)
    ),
    Case(
        "layer_norm",
        "layer_norm",
        _made(lambda randn, n: ((randn(n, 16), None, randn(16), randn(16)), {})),
        reference.layer_norm,
        (0, 2, 3),
    ),
    Case(
        "layer_norm-two-dimensions",
        "layer_norm",
        _made(lambda randn, n: ((randn(n, 3, 16), (3, 16), randn(3, 16)), {"bias": randn(3, 16)})),
        reference.layer_norm,
        (0, 2, "bias"),
    ),
    Case(
        "fused_add_rms_norm",
        "fused_add_rms_norm",
        _made(lambda randn, n: ((randn(n, 16), randn(n, 16), randn(16)), {})),
        reference.fused_add_rms_norm,
        (0, 1, 2),
    ),
    Case(
        "linear",
        "linear",
        _made(lambda randn, n: ((randn(2, n, 16), randn(24, 16), randn(24)), {})),
        reference.linear,
        (0, 1, 2),
    ),
    Case(
        "linear-plain", "linear", _made(lambda randn, n: ((randn(n, 16), randn(24, 16)), {})), reference.linear, (0, 1)
    ),
    Case(
        "linear_packed",
        "linear_packed",
        _made(
            lambda randn, n: (
                (randn(2, n, 16), randn(1, 16, 32, 1), randn(24)),
                {"out_features": 24, "activation": "silu"},
            )
        ),
        reference.linear_packed,
        (0, 1, 2),
    ),
    Case(
        "linear_quantized",
        "linear_quantized",
        _made(
            lambda randn, n: (
                (randn(2, n, 16), (randn(1, 16, 32, 1) * 40).clamp(-127, 127).to(torch.int8), randn(24)),
                {"scales": randn(1, 1, 32).abs() / 40, "out_features": 24, "activation": "silu"},
            )
        ),
        reference.linear_quantized,
        (0, 2),
    ),
    Case(
        "fused_mlp",
        "fused_mlp",
        _made(lambda randn, n: ((randn(n, 16), randn(24, 16), randn(16, 24), randn(24, 16)), {})),
        reference.fused_mlp,
        (0, 1, 2, 3),
    ),
    Case(
        "fused_mlp-gelu",
        "fused_mlp",
        _made(lambda randn, n: ((randn(n, 16), randn(24, 16), randn(16, 24)), {"activation": "gelu"})),
        reference.fused_mlp,
        (0, 1, 2),
    ),
    Case(
        "silu_mul",
        "silu_mul",
        _made(lambda randn, n: ((randn(2, n, 16), randn(2, n, 16)), {})),
        reference.silu_mul,
        (0, 1),
    ),
    Case("gelu", "gelu", _made(lambda randn, n: ((randn(2, n, 16),), {})), reference.gelu, (0,)),
    Case("gelu-tanh", "gelu", _made(lambda randn, n: ((randn(n, 16), "tanh"), {})), reference.gelu, (0,)),
    Case("softmax", "softmax", _made(lambda randn, n: ((randn(2, n, 16),), {})), reference.softmax, (0,)),
    Case(
        "sample_topk",
        "sample_topk",
        _made(lambda randn, n: ((randn(n, 11), 4), {"uniform": _uniform(n, n)})),
        reference.sample_topk,
    ),
    Case(
        "sample_topp",
        "sample_topp",
        _made(lambda randn, n: ((randn(n, 11), 0.7), {"uniform": _uniform(n, n)})),
        reference.sample_topp,
    ),
    Case("speculative_verify", "speculative_verify", _made(_speculative), reference.speculative_verify),
    Case("quantize", "quantize", _made(lambda randn, n: ((randn(n, 64), "int8"), {})), reference.quantize_int8),
    Case(
        "quantize-blockwise",
        "quantize",
        _made(lambda randn, n: ((randn(n, 64), "int8"), {"granularity": "blockwise", "group_size": 16})),
        reference.quantize_int8,
    ),
    Case(
        "quantize-given-scale",
        "quantize",
        _made(lambda randn, n: ((randn(n, 64), "int8", randn(n, 1).abs() / 64), {"granularity": "per_channel"})),
        reference.quantize_int8,
    ),
    Case(
        "dequantize",
        "dequantize",
        _made(
            lambda randn, n: (
                (_ids_of(n, 255, n, 64).sub(127).to(torch.int8), randn(n, 1).abs()),
                {"granularity": "per_channel"},
            )
        ),
        reference.dequantize,
    ),
    Case("kv_append", "kv_append", _made(_append), reference.kv_append, updates=(2, 3)),
    Case(
        "kv_compact",
        "kv_compact",
        _made(lambda randn, n: ((randn(n, 4, 2, 8), randn(n, 4, 2, 8), torch.tensor([[3, 0], [0, 2]])), {})),
        reference.kv_compact,
        updates=(0, 1),
    ),
]
IDS = [case.id for case in CASES]
DIFFERENTIABLE = [case for case in CASES if case.grads]
BY_ID = {case.id: case for case in CASES}
# One call per function, the first.
EVERY_FUNCTION = list({case.function: case for case in reversed(CASES)}.values())[::-1]


# --- checks -----------------------------------------------------------------------------------------------------------


def doubled(value: Any) -> Any:
    """Floats as float64, all else as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """All tensors of a result."""
    return () if result is None else (result,) if isinstance(result, Tensor) else tuple(result)


def copied(arguments: Arguments) -> Arguments:
    """Arguments that can be written to."""
    args, kwargs = arguments
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in args), dict(kwargs)


def run(case: Case, function: Callable[..., Any], n: int = 5) -> tuple[Tensor, ...]:
    """What a call gives: its results, then the tensors it updated."""
    args, kwargs = copied(case.make(n))
    result = as_tuple(function(*args, **kwargs))
    return (*result, *(args[at] for at in case.updates))


def expected(case: Case, n: int = 5) -> tuple[Tensor, ...]:
    """What it must give, in float64."""
    args, kwargs = case.make(n)
    return as_tuple(case.reference(*map(doubled, args), **{key: doubled(value) for key, value in kwargs.items()}))


def assert_right(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], tolerance: float = 2e-5) -> None:
    """Numbers within the tolerance of float32, ids and codes exactly."""
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        exact = not a.is_floating_point()
        torch.testing.assert_close(
            a.detach().double(), b.double(), rtol=0 if exact else tolerance, atol=0 if exact else tolerance
        )
