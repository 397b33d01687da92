"""torch's functions that compute what one of LayerZero's does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: A call of ours: the function and its arguments; or why a call of torch's is none.
Equivalent = tuple[str, dict[str, Any]] | str


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Equivalent:
    if query.dim() not in (3, 4) or key.dim() != query.dim() or value.dim() != query.dim():
        return f"its tensors have {query.dim()} dimensions; attention is over 3 or 4"
    if is_causal and query.shape[-2] != key.shape[-2]:
        # torch lets query i see the keys up to i, LayerZero those up to i + seq_k - seq_q.
        return "is_causal with as many queries as keys is the only one that means the same here"
    if query.dim() == 3:
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        attn_mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
    given = {"query": query, "key": key, "value": value, "causal": is_causal, "layout": "BHSD"}
    return "attention", {**given, "attn_mask": attn_mask, "dropout_p": dropout_p, "scale": scale}


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Equivalent:
    if input.dim() < 1 or weight.dim() != 2:
        return "its weight is no matrix"
    return "linear", {"input": input, "weight": weight, "bias": bias}


def _over_last(input: Tensor, sizes: Any, *weights: Tensor | None) -> list[Tensor | None] | None:
    """The tensors of a norm over several dimensions, as one over all of their elements in a row."""
    sizes = [sizes] if isinstance(sizes, int) else list(sizes)
    if not sizes or input.dim() < len(sizes) or list(input.shape[-len(sizes) :]) != sizes:
        return None
    return [input.flatten(-len(sizes)), *(weight if weight is None else weight.flatten() for weight in weights)]


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Equivalent:
    flat = _over_last(input, normalized_shape, weight)
    if flat is None:
        return f"normalized_shape {normalized_shape} is not how the input {tuple(input.shape)} ends"
    return "rms_norm", {
        "input": flat[0],
        "weight": flat[1],
        "eps": torch.finfo(input.dtype).eps if eps is None else eps,
    }


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Equivalent:
    flat = _over_last(input, normalized_shape, weight, bias)
    if flat is None:
        return f"normalized_shape {normalized_shape} is not how the input {tuple(input.shape)} ends"
    return "layer_norm", {"input": flat[0], "weight": flat[1], "bias": flat[2], "eps": eps}


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any
) -> Equivalent:
    if max_norm is not None:
        return "max_norm changes the table"
    return "embedding", {"indices": input, "weight": weight}


def _torch_embedding(weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> Equivalent:
    return "embedding", {"indices": indices, "weight": weight}


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Equivalent:
    if beta != 1 or alpha != 1:
        return "its product or its bias is scaled"
    if input.shape != mat2.shape[1:]:
        return "what is added is no bias"
    return "linear", {"input": mat1, "weight": mat2.t(), "bias": input}


def _matmul(input: Tensor, other: Tensor) -> Equivalent | None:
    # Products of more matrices at once are none of a layer.
    return ("linear", {"input": input, "weight": other.t()}) if input.dim() > 1 and other.dim() == 2 else None


def _gelu(input: Tensor, approximate: str = "none") -> Equivalent:
    return "gelu", {"input": input, "approximate": approximate}


#: torch's functions that compute what one of ours does, each with the call of ours it comes down to.
EQUIVALENTS: Mapping[Any, Callable[..., Equivalent | None]] = {
    F.scaled_dot_product_attention: _attention,
    F.linear: _linear,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.embedding: _embedding,
    torch.embedding: _torch_embedding,
    F.gelu: _gelu,
    torch.addmm: _addmm,
    torch.mm: _matmul,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
}

#: Those that are no functions of torch.nn.functional.
SOURCES: Mapping[Any, str] = {
    torch.addmm: "torch.addmm",
    torch.mm: "torch.mm",
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), "torch.matmul"),
}
