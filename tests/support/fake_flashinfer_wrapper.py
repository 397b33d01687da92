"""What the wrappers of the FlashInfer for the CPU share: what they check, what they record, and what they compute."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from attention_calls import attend, positions
from fake_flash_attn import loads, must
from torch import Tensor

if TYPE_CHECKING:
    from fake_flashinfer import FlashInfer

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HEADS = (64, 128, 256)


def contract_of(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window_left: int, scale: float, softcap: float
) -> Tensor:
    """Queries [n, heads, d] over keys [m, kv_heads, d]; NaN where there is no key."""
    must(scale > 0.0, "the largest score is found among unscaled ones")
    query, key = positions(q.shape[0], k.shape[0])
    allowed = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
    if causal:
        allowed &= key <= query
    if window_left >= 0:
        must(causal or q.shape[0] == 1, "windows without causal are not relied on")
        allowed &= key >= query - window_left
    heads_first = (t.transpose(0, 1) for t in (q, k, v))
    output = attend(*heads_first, allowed, scale, softcap).transpose(0, 1)
    return output.masked_fill(~allowed.any(-1)[:, None, None], torch.nan)


def lse_of(q: Tensor, k: Tensor, causal: bool, scale: float, softcap: float) -> Tensor:
    """The logarithms, to base 2, of the sums of exponentials: [n, heads]; minus infinity where there is no key."""
    scores = scale * torch.einsum("nhd,mhd->nhm", q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1))
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        query, key = positions(q.shape[0], k.shape[0])
        scores = scores.masked_fill((key > query)[:, None], -torch.inf)
    return torch.logsumexp(scores, -1) / math.log(2.0)


def written_like(q: Tensor, rows: Tensor) -> Tensor:
    """An output in memory like the query's, written in the order of a contiguous one."""
    out = torch.empty_like(q)
    out.as_strided(rows.shape, rows.contiguous().stride()).copy_(rows)
    return out


def maps(*tensors: Tensor) -> None:
    """What Hopper's copy engine reads it reads by a tensor map; one that cannot be made is printed, and used."""
    loads(*tensors)
    for t in tensors:
        strides = [stride * t.element_size() for stride in t.stride()[:-1]]
        must(all(stride > 0 and stride % 16 == 0 for stride in strides), "Failed to initialize the TMA descriptor")


def not_imitated(*given: Any) -> None:
    """Options of the library that no adapter uses: their defaults are the only values these fakes know."""
    must(not any(isinstance(value, Tensor) or value for value in given), "an option that the fake does not know")


def check_indices(*tensors: Tensor) -> None:
    """Index arrays are int32."""
    must(all(t.dtype == torch.int32 for t in tensors), "must be int32")


class Wrapper:
    """What all wrappers do."""

    library: FlashInfer

    def _made(self, workspace: Tensor) -> None:
        must(workspace.dtype == torch.uint8 and workspace.numel() >= 128 << 20, "a workspace of 128 MB")
        must(workspace.data_ptr() % 16 == 0, "16-byte aligned")
        self.workspace = workspace
        self.planned: dict[str, Any] | None = None
        self.library.made.append(self)

    def _plan(self, **kept: Any) -> None:
        self.library.plans.append(type(self).__name__)
        self.planned = {key: v.clone() if isinstance(v, Tensor) else v for key, v in kept.items()}

    def _ran(self) -> dict[str, Any]:
        must(self.planned is not None, "plan info is not initialized")
        assert self.planned is not None
        self.library.runs.append(type(self).__name__)
        return self.planned


def scale_of(scale: float | None, head_dim: int) -> float:
    """The default scale."""
    return head_dim**-0.5 if scale is None else scale
