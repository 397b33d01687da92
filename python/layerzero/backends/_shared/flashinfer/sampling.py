"""Sampling by rejection.

A draw is a function of the seed, and distributed as the operation says; which token a given uniform number draws is not
for this method to say, so calls with `uniform` go elsewhere. Of tokens that equal the last kept one, any may be drawn.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.arrays import draw_seed
from layerzero.kernels import draws

from ..blocks import rows_of

# The library, once it is found.
_library: Any = None
# Its seeds are not negative.
_SEEDS = 2**63


def bind(library: Any) -> None:
    """Keeps the library."""
    global _library
    _library = library


@draws
def topk(logits: Tensor, k: int, seed: int | None) -> Tensor:
    """Draws one of the k most likely tokens of each row."""
    return _drawn(_library.top_k_sampling_from_probs, logits, min(k, logits.shape[-1]), seed)


@draws
def topp(logits: Tensor, p: float, seed: int | None) -> Tensor:
    """Draws from the smallest set of tokens whose probability reaches p."""
    return _drawn(_library.top_p_sampling_from_probs, logits, p, seed)


def _drawn(draw: Any, logits: Tensor, kept: float, seed: int | None) -> Tensor:
    if seed is None:
        seed = draw_seed()
    probabilities = torch.softmax(rows_of(logits), -1, dtype=torch.float32)
    ids: Tensor = draw(probabilities, kept, deterministic=True, seed=seed % _SEEDS, offset=0)
    # A NaN, and a row without any finite logit, make all of them NaN.
    return torch.where(probabilities[:, 0].isnan(), -1, ids.long()).view(logits.shape[:-1])


KERNELS: dict[str, Callable[..., Any]] = {"flashinfer.topk": topk, "flashinfer.topp": topp}
