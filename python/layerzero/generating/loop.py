"""The loop of `generate`: all tokens of the prompt in one step, then a step for each new token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import InvalidCallError, warn
from layerzero.generating.decoder import Decoder
from layerzero.generating.sampling import Choice

#: Called with the new token of each sequence, (batch,). Generating ends when it returns False.
OnToken = Callable[[Tensor], Any]


def prompt(
    input_ids: Any, attention_mask: Tensor | None, pad: int | None = None, ending: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Prompts as one tensor (batch, tokens), padded on the left, and how much padding is before each.

    `input_ids` is a tensor, one prompt as a list of ids, or a list of prompts of any lengths. Without a mask, the id `pad` in a
    tensor is padding, unless it also ends texts (`ending`). transformers has the same rule.
    """
    if not isinstance(input_ids, Tensor):
        if attention_mask is not None:
            text = "attention_mask is for a tensor of prompts"
            raise InvalidCallError(text, code="BAD_PARAM", hint="a list of prompts is padded here")
        return _padded(input_ids, pad)
    if input_ids.dim() == 1:
        input_ids = input_ids[None]
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32) or input_ids.numel() == 0:
        text = f"input_ids is {input_ids.dtype} of shape {list(input_ids.shape)}, expected ids (batch, tokens)"
        raise InvalidCallError(text, code="WRONG_SHAPE", hint="pass what the tokenizer gives")
    ids = input_ids.to(torch.int64).contiguous()
    if attention_mask is None:
        return ids, _inferred(ids, pad, ending)
    if attention_mask.shape != ids.shape:
        text = f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(ids.shape)}"
        raise InvalidCallError(text, code="WRONG_SHAPE", hint="pass both as the tokenizer gives them")
    firsts = _firsts(attention_mask != 0)
    if firsts is None:
        raise InvalidCallError(
            "attention_mask leaves out tokens that are not at the start, or all of a prompt",
            code="BAD_DATA",
            hint='pad on the left: tokenizer.padding_side = "left"',
        )
    return ids, firsts


def _firsts(kept: Tensor) -> Tensor | None:
    """How much padding is before each prompt; ``None`` if padding is elsewhere too, or a prompt is only padding."""
    length = kept.shape[1]
    firsts = length - kept.sum(-1)
    on_the_left = torch.equal(kept, torch.arange(length, device=kept.device) >= firsts[:, None])
    return firsts if on_the_left and bool((firsts < length).all()) else None


def _inferred(ids: Tensor, pad: int | None, ending: Tensor | None) -> Tensor:
    """How much padding is before each prompt, by the ids alone."""
    none = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
    if pad is None or not bool((ids == pad).any()):
        return none
    if ending is not None and pad in ending:
        if len(ids) > 1 and bool((ids[:, 0] == pad).any()):
            warn(f"prompts begin with {pad}, which pads and ends texts: it is read as a token. Pass attention_mask")
        return none
    firsts = _firsts(ids != pad)
    if firsts is None:
        raise InvalidCallError(
            f"prompts have the padding token {pad} elsewhere than at the start, or nothing else",
            code="BAD_DATA",
            hint='pad on the left (tokenizer.padding_side = "left"), or pass attention_mask to say that it is a token',
        )
    return firsts


def _ids(one: Any) -> Tensor:
    """The ids of a prompt."""
    try:
        found = torch.as_tensor(one)
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"a prompt is {str(one)[:60]!r}, expected ids"
        raise InvalidCallError(text, code="BAD_DATA", hint="pass what the tokenizer gives as input_ids") from error
    if found.numel() and (found.dtype.is_floating_point or found.dtype.is_complex or found.dtype == torch.bool):
        text = f"a prompt holds {str(found.dtype).removeprefix('torch.')}, expected ids, which are integers"
        raise InvalidCallError(text, code="BAD_DATA", hint="pass what the tokenizer gives as input_ids")
    return found.to(torch.int64).flatten()


def _padded(prompts: Any, pad: int | None) -> tuple[Tensor, Tensor]:
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        text = f"input_ids is a {type(prompts).__name__}, expected ids"
        raise InvalidCallError(text, code="BAD_DATA", hint="pass a tensor or a list of ids: tokenizer(text).input_ids")
    prompts = list(prompts)
    if prompts and all(isinstance(one, Integral) and not isinstance(one, bool) for one in prompts):
        # One prompt.
        prompts = [prompts]
    rows = [_ids(one) for one in prompts]
    if not rows or any(len(row) == 0 for row in rows):
        raise InvalidCallError("there is a prompt without tokens", code="WRONG_SHAPE", hint="pass one token or more")
    most = max(map(len, rows))
    ids = torch.full((len(rows), most), pad or 0, dtype=torch.int64)
    for row, to in zip(rows, ids, strict=True):
        to[most - len(row) :] = row
    return ids, torch.tensor([most - len(row) for row in rows])


def ends(model: Any, eos_token_id: int | Sequence[int] | None) -> Tensor:
    """The ids that end a sequence: yours, else the model's."""
    if eos_token_id is None:
        own = getattr(model, "generation_config", None) or model.config
        eos_token_id = getattr(own, "eos_token_id", None)
    if eos_token_id is None:
        return torch.empty(0, dtype=torch.int64)
    return torch.as_tensor(eos_token_id, dtype=torch.int64).flatten()


def padding(model: Any, pad_token_id: int | None, ending: Tensor) -> int | None:
    """The id of padding: yours, else the model's, else the first of the ids that end a text."""
    if pad_token_id is None:
        own = getattr(model, "generation_config", None) or model.config
        pad_token_id = getattr(own, "pad_token_id", None)
    if pad_token_id is None and len(ending):
        return int(ending[0])
    return pad_token_id


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
    """The prompts and the new tokens, (batch, tokens). A sequence that has ended is filled with `pad`."""
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        text = f"max_new_tokens is {max_new_tokens!r}, expected 0 or more"
        raise InvalidCallError(text, code="BAD_PARAM", hint="pass how many tokens to generate")
    (batch, length), filled = ids.shape, int(pad or 0)
    device = decoder.device
    found = torch.full((batch, length + max_new_tokens), filled, dtype=torch.int64, device=device)
    found[:, :length] = ids
    if not max_new_tokens:
        return found
    padding = firsts.to(device) if bool((firsts != 0).any()) else None
    with decoder.taken_cache(batch, length + max_new_tokens - 1) as cache, torch.no_grad():
        running, ending = torch.ones(batch, dtype=torch.bool, device=device), ending.to(device)
        new, position = ids.to(device), torch.zeros(1, dtype=torch.int64, device=device)
        for at in range(length, length + max_new_tokens):
            logits = decoder.step(new, position, padding, cache)
            position += new.shape[1]
            tokens = choose(logits)
            if len(ending):
                tokens = tokens.where(running, filled)
                running &= torch.isin(tokens, ending, invert=True)
            found[:, at] = tokens
            wanted = True if on_token is None else on_token(tokens)
            if wanted is False or len(ending) and not bool(running.any()):
                return found[:, : at + 1]
            new = tokens[:, None]
    return found
