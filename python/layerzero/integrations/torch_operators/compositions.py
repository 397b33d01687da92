"""The functions as a user of torch would write them: what a compiler may fuse with the code around a call.

Each gives what the function promises: rounded once, in the dtype of its input, for weights of any dtype. Shapes were
checked before. None of them copies, reads a value or looks at memory, so that they can be traced.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.backends._shared.torch_functions.norm import LEAST_EPS


def _work(tensor: Tensor) -> torch.dtype:
    """The dtype to compute in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _work_of_squares(tensor: Tensor, eps: float) -> torch.dtype:
    """The dtype whose smallest numbers are below those of squares that count."""
    small = eps < LEAST_EPS and tensor.dtype in (torch.float32, torch.bfloat16)
    return torch.float64 if small else _work(tensor)


def rms_norm(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    work = _work_of_squares(input, eps)
    if work == _work(input) and (weight is None or weight.dtype == input.dtype):
        return F.rms_norm(input, input.shape[-1:], weight, eps)
    return _normalized(input.to(work), weight, eps).to(input.dtype)


def _normalized(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight.to(x.dtype)


def layer_norm(
    input: Tensor,
    normalized_shape: Any = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Norm over the trailing dimensions."""
    sizes = input.shape[-1:] if normalized_shape is None else list(normalized_shape)
    if all(given is None or given.dtype == input.dtype for given in (weight, bias)):
        return F.layer_norm(input, sizes, weight, bias, eps)
    work = _work(input)
    weight, bias = (None if given is None else given.to(work) for given in (weight, bias))
    return F.layer_norm(input.to(work), sizes, weight, bias, eps).to(input.dtype)


def fused_add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """The norm of a sum, and the sum."""
    work = _work_of_squares(input, eps)
    total = input.to(work) + residual.to(work)
    return _normalized(total, weight, eps).to(input.dtype), total.to(input.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu of the gate times the other half."""
    return F.silu(gate) * up


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit."""
    return F.gelu(input, approximate=approximate)


def softmax(input: Tensor) -> Tensor:
    """Softmax over the last dimension."""
    return torch.softmax(input, -1)


def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table."""
    return F.embedding(indices, weight)


def rope(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    positions: Tensor | None = None,
    layout: str = "BSHD",
) -> Tensor:
    """Rotary embedding: pairs of elements turned by an angle per position."""
    head_dim, rot = input.shape[-1], cos.shape[-1]
    # Tables as wide as a head hold everything twice.
    pairs = head_dim // 2 if rot == head_dim else rot
    work = _work(input)
    cos, sin = (_of_tokens(table[:, :pairs], input, positions, layout).to(work) for table in (cos, sin))
    turning = input[..., : 2 * pairs].to(work)
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning[..., :pairs], turning[..., pairs:]
    turned = first * cos - second * sin, second * cos + first * sin
    output = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    output = output.to(input.dtype)
    return output if 2 * pairs == head_dim else torch.cat((output, input[..., 2 * pairs :]), -1)


def _of_tokens(table: Tensor, input: Tensor, positions: Tensor | None, layout: str) -> Tensor:
    """The rows of a table that belong to the tokens of the input, broadcast over its heads."""
    if positions is None:
        tokens = input.shape[2] if layout == "BHSD" else input.shape[-3]
        last = table.shape[0]
        torch._check(tokens <= last, lambda: f"rope: cos and sin have rows 0 to below {last}")  # type: ignore[no-untyped-call]
        rows = table[:tokens]
    else:
        rows = table[positions]
    if layout == "NHD":
        rows = rows[0] if rows.dim() == 3 else rows
        return rows[:, None]
    return rows.unsqueeze(-3 if layout == "BHSD" else -2)


def alibi_bias(slopes: Tensor, seq_q: int, seq_k: int) -> Tensor:
    """Linear bias by distance, aligned bottom-right."""
    work = _work(slopes)
    queries = torch.arange(seq_q, device=slopes.device) + (seq_k - seq_q)
    distance = (queries[:, None] - torch.arange(seq_k, device=slopes.device)).abs()
    return (slopes.to(work)[:, None, None] * -distance.to(work)).to(slopes.dtype)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Matrix product; the sum with the bias is rounded once."""
    if bias is None or input.dim() == 2 or input.dtype in (torch.float32, torch.float64) or input.is_contiguous():
        return F.linear(input, weight, bias)
    rows = input.reshape(-1, input.shape[-1])
    return F.linear(rows, weight, bias).reshape(*input.shape[:-1], weight.shape[0])


def fused_mlp(
    input: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """Up-projection, activation, down-projection."""
    activate: Any = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}[activation]
    if gate_weight is None:
        return F.linear(activate(F.linear(input, up_weight)), down_weight)
    gate: Tensor = activate(F.linear(input, gate_weight))
    return F.linear(gate * F.linear(input, up_weight), down_weight)


def fused_mlp_wide(
    input: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """The same of half-width floats in float32, rounded once."""
    gate_weight = None if gate_weight is None else gate_weight.float()
    return fused_mlp(input.float(), up_weight.float(), down_weight.float(), gate_weight, activation).to(input.dtype)


#: Functions that are cheap next to the memory they read: a compiler that fuses them with their neighbours saves more than
#: a better kernel does.
FUSED: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "silu_mul": silu_mul,
    "gelu": gelu,
    "softmax": softmax,
    "embedding": embedding,
    "rope": rope,
    "alibi_bias": alibi_bias,
}
