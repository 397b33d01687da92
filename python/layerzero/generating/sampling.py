"""The next token of each sequence, from the scores of all tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from layerzero._native import sample_topk, sample_topp
from layerzero.errors import InvalidCallError

#: From scores (batch, vocabulary) to ids (batch,).
Choice = Callable[[Tensor], Tensor]


def greedy(scores: Tensor) -> Tensor:
    """The token with the largest score; the first among equals."""
    return scores.argmax(-1)


def choice(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    generator: torch.Generator | None,
) -> Choice:
    """How to choose: greedily, or drawn if a temperature, `top_k` or `top_p` is given."""
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

    def drawn(scores: Tensor) -> Tensor:
        scores = scores.float()
        if temperature is not None:
            scores = scores / temperature
        numbers = source(scores.device)
        where = scores.device if numbers is None else numbers.device
        uniform = torch.rand(scores.shape[:-1], generator=numbers, device=where).to(scores.device)
        ids = _draw(scores, top_k, top_p, uniform)
        if bool((ids < 0).any()):
            raise InvalidCallError(
                "the model's scores are not numbers", code="BAD_DATA", hint="look for NaN in its weights"
            )
        return ids

    return drawn


def _draw(scores: Tensor, top_k: int | None, top_p: float | None, uniform: Tensor) -> Tensor:
    if top_k is None:
        drawn: Tensor = sample_topp(scores, 1.0 if top_p is None else top_p, uniform=uniform)
        return drawn
    if top_p is None:
        drawn = sample_topk(scores, min(top_k, scores.shape[-1]), uniform=uniform)
        return drawn
    # The most likely so many, and of their probability the part that is asked for.
    kept, ids = scores.topk(min(top_k, scores.shape[-1]), dim=-1)
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
