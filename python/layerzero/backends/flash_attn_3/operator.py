"""The operator below the functions of FlashAttention 3.

They wrap it in one of Python's, for gradients and tracing, which costs the host much more than the call itself, and makes two
empty tensors each time. Calls without gradients go past that where the operator takes what is known of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: What it takes, in order.
ARGUMENTS = (
    *("q", "k", "v", "k_new", "v_new", "q_v", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q"),
    *(
        "seqused_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "page_table",
        "kv_batch_idx",
        "leftpad_k",
        "rotary_cos",
        "rotary_sin",
    ),
    *("seqlens_rotary", "q_descale", "k_descale", "v_descale", "softmax_scale", "is_causal", "window_size_left"),
    *("window_size_right", "attention_chunk", "softcap", "is_rotary_interleaved", "scheduler_metadata", "num_splits"),
    *("pack_gqa", "sm_margin"),
)


def find() -> Any:
    """The operator; `None` where there is none, or it takes something else."""
    try:
        operator = torch.ops.flash_attn_3.fwd.default
        names = tuple(argument.name for argument in operator._schema.arguments)
    except (AttributeError, RuntimeError):
        return None
    return operator if names == ARGUMENTS else None


def forward(operator: Any) -> Callable[..., Tensor]:
    """A function that calls it, with names as the library's functions have them. It finds out by itself how many parts the
    keys are split into."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        cache_seqlens: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
    ) -> Tensor:
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        pages = (None, None, None, cache_seqlens, max_seqlen_q, None, page_table)
        others = (None,) * 8
        window = (causal, *window_size, 0, softcap, True, None, 0, None, 0)
        output: Tensor = operator(q, k, v, None, None, None, None, cu_seqlens_q, *pages, *others, scale, *window)[0]
        return output

    return attend
