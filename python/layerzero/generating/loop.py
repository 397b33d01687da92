"""Generating: the prompt at once, then a step for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import InvalidCallError
from layerzero.generating.decoder import Decoder
from layerzero.generating.sampling import Choice

#: Called with the new token of each sequence, (batch,). Generating ends where it returns False.
OnToken = Callable[[Tensor], Any]


def prompt(input_ids: Any, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Prompts as one tensor (batch, tokens), padded on the left, and how much padding is before each.

    `input_ids` is a tensor, or a list of prompts, each a tensor or a list of ids, of any lengths.
    """
    if not isinstance(input_ids, Tensor):
        if attention_mask is not None:
            text = "attention_mask is for a tensor of prompts"
            raise InvalidCallError(text, code="BAD_PARAM", hint="a list of prompts is padded here")
        return _padded(input_ids)
    if input_ids.dim() == 1:
        input_ids = input_ids[None]
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32) or input_ids.numel() == 0:
        text = f"input_ids is {input_ids.dtype} of shape {list(input_ids.shape)}, expected ids (batch, tokens)"
        raise InvalidCallError(text, code="WRONG_SHAPE", hint="pass what the tokenizer gives")
    ids = input_ids.to(torch.int64).contiguous()
    if attention_mask is None:
        return ids, torch.zeros(ids.shape[0], dtype=torch.int64)
    if attention_mask.shape != ids.shape:
        text = f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(ids.shape)}"
        raise InvalidCallError(text, code="WRONG_SHAPE", hint="pass both as the tokenizer gives them")
    kept = attention_mask != 0
    firsts = ids.shape[1] - kept.sum(-1)
    if not torch.equal(kept, torch.arange(ids.shape[1]) >= firsts[:, None]) or bool((firsts == ids.shape[1]).any()):
        raise InvalidCallError(
            "attention_mask leaves out tokens that are not at the start, or all of a prompt",
            code="BAD_DATA",
            hint='pad on the left: tokenizer.padding_side = "left"',
        )
    return ids, firsts


def _padded(prompts: Sequence[Any]) -> tuple[Tensor, Tensor]:
    rows = [torch.as_tensor(one, dtype=torch.int64).flatten() for one in prompts]
    if not rows or any(len(row) == 0 for row in rows):
        raise InvalidCallError("there is a prompt without tokens", code="WRONG_SHAPE", hint="pass one token or more")
    most = max(map(len, rows))
    ids = torch.zeros(len(rows), most, dtype=torch.int64)
    for row, to in zip(rows, ids, strict=True):
        to[most - len(row) :] = row
    return ids, torch.tensor([most - len(row) for row in rows])


def ends(model: Any, eos_token_id: int | Sequence[int] | None) -> Tensor:
    """The ids that end a sequence: those given, else those of the model."""
    if eos_token_id is None:
        own = getattr(model, "generation_config", None) or model.config
        eos_token_id = getattr(own, "eos_token_id", None)
    if eos_token_id is None:
        return torch.empty(0, dtype=torch.int64)
    return torch.as_tensor(eos_token_id, dtype=torch.int64).flatten()


def generate(
    decoder: Decoder,
    ids: Tensor,
    firsts: Tensor,
    max_new_tokens: int,
    choose: Choice,
    ending: Tensor,
    pad: int | None,
    on_token: OnToken | None,
) -> Tensor:
    """The prompts and what follows them, (batch, tokens). After its end, a sequence is filled with `pad`."""
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        text = f"max_new_tokens is {max_new_tokens!r}, expected 0 or more"
        raise InvalidCallError(text, code="BAD_PARAM", hint="pass how many tokens to generate")
    (batch, length), filled = ids.shape, int(ending[0]) if pad is None and len(ending) else int(pad or 0)
    found = torch.full((batch, length + max_new_tokens), filled, dtype=torch.int64)
    found[:, :length] = ids
    if not max_new_tokens:
        return found
    with decoder.lock, torch.no_grad():
        cache = decoder.cache(batch, length + max_new_tokens - 1)
        running, new, position = torch.ones(batch, dtype=torch.bool), ids, torch.zeros(1, dtype=torch.int64)
        for at in range(length, length + max_new_tokens):
            scores = decoder.step(new, position, firsts, cache)
            position += new.shape[1]
            tokens = choose(scores)
            if len(ending):
                tokens = tokens.where(running, filled)
                running &= torch.isin(tokens, ending, invert=True)
            found[:, at] = tokens
            wanted = True if on_token is None else on_token(tokens)
            if wanted is False or len(ending) and not bool(running.any()):
                return found[:, : at + 1]
            new = tokens[:, None]
    return found
