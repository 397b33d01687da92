"""The next token of each sequence, from the logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from layerzero._native import sample_topk, sample_topp
from layerzero.errors import InvalidCallError

#: From logits (batch, vocabulary) to ids (batch,).
Choice = Callable[[Tensor], Tensor]


def greedy(logits: Tensor) -> Tensor:
    """The token with the largest logit; the first of equal ones."""
    return logits.argmax(-1)


def choice(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    generator: torch.Generator | None,
) -> Choice:
    """How to choose: sampled if `temperature`, `top_k` or `top_p` is given, else greedily."""
    _check(temperature, top_k, top_p)
    if seed is not None and generator is not None:
        raise InvalidCallError(
            "both seed and generator are given",
            code="BAD_PARAM",
            hint="a generator has a seed of its own: leave seed out",
        )
    if temperature == 0 or (temperature is None and top_k is None and top_p is None):
        return greedy
    sources: dict[torch.device, torch.Generator | None] = {}

    def source(device: torch.device) -> torch.Generator | None:
        """Whose random numbers are used for scores on a device."""
        if seed is None:
            return generator
        if device not in sources:
            sources[device] = torch.Generator(device).manual_seed(seed)
        return sources[device]

    def sampled(logits: Tensor) -> Tensor:
        logits = logits.float()
        if temperature is not None:
            logits = logits / temperature
        numbers = source(logits.device)
        where = logits.device if numbers is None else numbers.device
        uniform = torch.rand(logits.shape[:-1], generator=numbers, device=where).to(logits.device)
        ids = _sample(logits, top_k, top_p, uniform)
        if bool((ids < 0).any()):
            raise InvalidCallError("the model's logits are NaN", code="BAD_DATA", hint="look for NaN in its weights")
        return ids

    return sampled


def _sample(logits: Tensor, top_k: int | None, top_p: float | None, uniform: Tensor) -> Tensor:
    if top_k is None:
        sampled: Tensor = sample_topp(logits, 1.0 if top_p is None else top_p, uniform=uniform)
        return sampled
    if top_p is None:
        sampled = sample_topk(logits, min(top_k, logits.shape[-1]), uniform=uniform)
        return sampled
    # First the `top_k` largest logits, then `top_p` of their probability.
    kept, ids = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    places = sample_topp(kept, top_p, uniform=uniform)
    found: Tensor = ids.gather(-1, places.clamp(min=0)[:, None])[:, 0]
    return found.where(places >= 0, places)


def _check(temperature: float | None, top_k: int | None, top_p: float | None) -> None:
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        text = f"temperature is {temperature}, expected 0 or more"
        raise InvalidCallError(text, code="BAD_PARAM", hint="0 takes the most likely token")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        text = f"top_k is {top_k!r}, expected 1 or more"
        raise InvalidCallError(text, code="BAD_PARAM", hint="leave it out to keep all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        text = f"top_p is {top_p}, expected a probability above 0"
        raise InvalidCallError(text, code="BAD_PARAM", hint="1 keeps all tokens")
