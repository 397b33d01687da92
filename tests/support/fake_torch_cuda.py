"""The attention kernels of torch for CUDA: functions of the same signatures, which compute what they would."""

from __future__ import annotations

from typing import Any

import torch
from attention_calls import attend, positions
from layerzero.backends._shared.operands import readable
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def _check(query: Tensor, key: Tensor, value: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """What the kernels refuse, and what they would fail at."""
    assert query.dtype == key.dtype == value.dtype and query.dtype in dtypes
    assert query.shape[-1] * query.element_size() % 16 == 0 and value.shape[-1] * value.element_size() % 16 == 0
    assert all(readable(t) for t in (query, key, value))


def _reached(seq_q: int, seq_k: int, left: int, right: int) -> Tensor:
    query, key = positions(seq_q, seq_k)
    allowed = torch.ones(seq_q, seq_k, dtype=torch.bool)
    allowed &= key <= query + right if right >= 0 else allowed
    return allowed & (key >= query - left) if left >= 0 else allowed


def _dense(query: Tensor, key: Tensor, value: Tensor, scale: float | None, **options: Any) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    assert scale > 0.0
    allowed = options.pop("allowed", torch.ones(query.shape[2], key.shape[2], dtype=torch.bool))
    return attend(query, key, value, allowed, scale, **options).to(query.dtype)


def _tuple(output: Tensor, length: int, lse: Tensor | None = None) -> tuple[Any, ...]:
    return output, lse, *(None for _ in range(length - 2))


def _lse(query: Tensor, key: Tensor, scale: float | None, allowed: Tensor) -> Tensor:
    """The logarithms as FlashAttention 2 gives them: plus infinity where a query attends to nothing."""
    group, scale = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.double() @ key.double().repeat_interleave(group, 1).transpose(-1, -2) * scale
    lse = scores.masked_fill(~allowed, -torch.inf).logsumexp(-1).float()
    return lse.masked_fill(lse == -torch.inf, torch.inf)


class Aten:
    """The kernels of torch for CUDA, and what they were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def flash(
        self, query: Any, key: Any, value: Any, dropout_p: Any = 0.0, is_causal: Any = False,
        return_debug_mask: Any = False, *, scale: Any = None,
    ) -> Any:  # fmt: skip
        self.calls.append(("flash", locals()))
        _check(query, key, value, HALVES)
        assert query.shape[-1] == value.shape[-1] <= 256 and query.shape[1] % key.shape[1] == 0
        allowed = _reached(query.shape[2], key.shape[2], -1, 0 if is_causal else -1)
        return _tuple(_dense(query, key, value, scale, allowed=allowed), 9, _lse(query, key, scale, allowed))

    def cudnn(
        self, query: Any, key: Any, value: Any, attn_bias: Any, compute_log_sumexp: Any, dropout_p: Any = 0.0,
        is_causal: Any = False, return_debug_mask: Any = False, *, scale: Any = None,
    ) -> Any:  # fmt: skip
        self.calls.append(("cudnn", locals()))
        _check(query, key, value, HALVES)
        assert attn_bias is None and key.shape[2] > 1
        wanted = any(t.requires_grad for t in (query, key, value))
        assert compute_log_sumexp is wanted
        allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
        return _tuple(_dense(query, key, value, scale, allowed=allowed.tril() if is_causal else allowed), 9)

    def efficient(
        self, query: Any, key: Any, value: Any, attn_bias: Any, compute_log_sumexp: Any, dropout_p: Any = 0.0,
        is_causal: Any = False, *, scale: Any = None,
    ) -> Any:  # fmt: skip
        self.calls.append(("efficient", locals()))
        _check(query, key, value, (*HALVES, torch.float32))
        assert query.shape[1] == key.shape[1]
        allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
        allowed = allowed.tril() if is_causal else allowed
        if attn_bias is not None:
            assert attn_bias.shape == (*query.shape[:3], key.shape[2]) and attn_bias.dtype == query.dtype
            assert attn_bias.stride(-1) == 1 and attn_bias.data_ptr() % 16 == 0
            assert all(attn_bias.stride(i) * attn_bias.element_size() % 16 == 0 for i in range(3))
            # A query that reaches nothing: the kernel promises nothing.
            return _tuple(_dense(query, key, value, scale, allowed=attn_bias != -torch.inf, bias=attn_bias), 4)
        return _tuple(_dense(query, key, value, scale, allowed=allowed), 4)

    def flash_forward(
        self, query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: Any, max_k: Any, dropout_p: Any,
        is_causal: Any, return_debug_mask: Any, *, scale: Any = None, window_size_left: Any = None,
        window_size_right: Any = None, seqused_k: Any = None, alibi_slopes: Any = None,
    ) -> Any:  # fmt: skip
        self.calls.append(("flash_forward", locals()))
        left, right = window_size_left, 0 if is_causal else window_size_right
        if cum_seq_q is None:
            _check(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), HALVES)
            q, k, v = (t.transpose(1, 2) for t in (query, key, value))
            allowed = _reached(q.shape[2], k.shape[2], left, right)
            lse = _lse(q, k, scale, allowed)
            return _tuple(_dense(q, k, v, scale, allowed=allowed).transpose(1, 2), 5, lse)
        lengths = cum_seq_k.diff().int() if seqused_k is None else seqused_k
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in (cum_seq_q, cum_seq_k, lengths))
        assert query.dtype == key.dtype == value.dtype and query.dtype in HALVES
        assert all(readable(t) for t in (query, key, value))
        output = torch.full_like(query, torch.nan)
        logarithms = torch.full((query.shape[1], query.shape[0]), torch.nan)
        for i, used in enumerate(lengths.tolist()):
            rows = slice(int(cum_seq_q[i]), int(cum_seq_q[i + 1]))
            assert rows.stop - rows.start <= max_q and used <= max_k
            first = int(cum_seq_k[i])
            q, k, v = query[rows], key[first : first + used], value[first : first + used]
            allowed = _reached(q.shape[0], used, left, right)
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            output[rows] = _dense(q, k, v, scale, allowed=allowed)[0].transpose(0, 1) if used else 0.0
            logarithms[:, rows] = _lse(q, k, scale, allowed)[0] if used else torch.inf
        return _tuple(output, 5, logarithms)

    def efficient_forward(
        self, query: Any, key: Any, value: Any, bias: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any,
        max_seqlen_k: Any, dropout_p: Any, custom_mask_type: Any, compute_log_sumexp: Any = False, *,
        scale: Any = None, seqlen_k: Any = None, window_size: Any = None,
    ) -> Any:  # fmt: skip
        self.calls.append(("efficient_forward", locals()))
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        _check(q, k, v, (*HALVES, torch.float32))
        assert q.shape[1] == k.shape[1] and custom_mask_type == 2 and q.shape[2] <= k.shape[2]
        allowed = _reached(q.shape[2], k.shape[2], -1 if window_size is None else window_size - 1, 0)
        return _tuple(_dense(q, k, v, scale, allowed=allowed).transpose(1, 2), 6)
