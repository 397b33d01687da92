"""Attention as transformers calls it, served by `lz.attention`.

The mask says everything about which keys a query attends to (see :mod:`~layerzero.integrations._transformers.masks`), as
with transformers' own ``sdpa``. What `lz.attention` cannot express runs through the model's own attention function, with
the same mask and a warning.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

from layerzero._native import attention
from layerzero.errors import InvalidCallError, warn
from layerzero.integrations._transformers.masks import Described, DescribedMask, additive, written
from layerzero.integrations.refusals import unsupported
from layerzero.sdpa import scaled_dot_product_attention

__all__ = ["attend", "own_attention"]

#: Arguments that say nothing about the result: the mask has it already, or they are for other functions.
_KNOWN = frozenset(
    [
        "attention_mask",
        "cache",
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "index_k",
        "index_q",
        "input_ids",
        "is_causal",
        "labels",
        "layer_idx",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "max_seqlen",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "sliding_window",
        "use_cache",
    ]
)

_said: set[tuple[str, str]] = set()


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The function for transformers' ``AttentionInterface``: (batch, heads, sequence, head_dim) in, sequence first out.

    Args:
        module: the attention module that calls.
        query: (batch, heads, queries, head_dim).
        key: (batch, kv_heads, keys, head_dim).
        value: (batch, kv_heads, keys, value_dim).
        attention_mask: (batch or 1, heads or 1, queries, keys), of bools or added to the scores. None: causal if
            ``is_causal`` says so and there is more than one query, as for transformers' ``sdpa``.
        dropout: probability that a weight is dropped.
        scaling: softmax scale; 1/sqrt(head_dim) when not given.
        is_causal: what a missing mask means; the module's own ``is_causal`` when not given.
        position_bias: added to the scores, (batch or 1, heads, queries, keys).
        softcap: scores become softcap · tanh(scores / softcap).
        s_aux: a sink per head, which joins the softmax and has no value.
        indices: the only keys each query may attend to, (batch, queries, count).
        given: what else a model hands to its attention function.
    """
    if given.get("cache") is not None:
        raise _refused(module, "the paged cache of continuous batching")
    if (starts := given.get("cu_seq_lens_q")) is not None and starts.shape[0] > 2:
        attention_mask = _packed(module, query, key, attention_mask, starts, is_causal)
    if type(attention_mask) is DescribedMask and attention_mask.made is not None:
        # Somebody may have written into it since.
        attention_mask = attention_mask.made
    unknown = None if given.keys() <= _KNOWN else _unknown(module, given)
    if unknown is not None:
        why = f"the argument {unknown}"
    elif s_aux is not None and dropout:
        why = "attention sinks with dropout"
    elif s_aux is not None and s_aux.shape != query.shape[1:2]:
        why = f"attention sinks of shape {list(s_aux.shape)}"
    elif given.get("output_attentions"):
        why = "output_attentions=True"
    elif softcap is not None and dropout:
        why = "softcap with dropout"
    elif type(attention_mask) is not DescribedMask and not _usable(attention_mask, query, key):
        why = f"a mask of the form {_form(attention_mask)}"
    elif position_bias is None and indices is None and not dropout:
        if type(attention_mask) is DescribedMask:
            out = _described(query, key, value, attention_mask, scaling, softcap or 0.0, s_aux)
        else:
            out = _masked(module, query, key, value, attention_mask, scaling, is_causal, softcap or 0.0, s_aux)
        return out.transpose(1, 2).contiguous(), None
    else:
        return _merged(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout,
            scaling,
            is_causal,
            position_bias,
            softcap,
            s_aux,
            indices,
        )
    if indices is not None:
        raise _refused(module, f"{why} together with sparse indices")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    arguments = {"position_bias": position_bias, "softcap": softcap, "s_aux": s_aux}
    given |= {name: argument for name, argument in arguments.items() if argument is not None}
    return own_attention(module, query, key, value, attention_mask, dropout, scaling, bool(causal), why, given)


def _packed(
    module: Any, query: torch.Tensor, key: torch.Tensor, mask: Any, starts: torch.Tensor, is_causal: bool | None
) -> Any:
    """The mask of sequences that begin at these positions of one row, whether it separates them already or not."""
    length = query.shape[2]
    is_real = isinstance(mask, torch.Tensor) and type(mask) is not DescribedMask
    if is_real and (query.shape[0] != 1 or mask.shape[-2:] != (length, length)):
        return mask
    if query.shape[0] != 1 or key.shape[2] != length:
        raise _refused(module, f"cu_seq_lens_q with {query.shape[0]} rows, {length} queries and {key.shape[2]} keys")
    at = torch.bucketize(torch.arange(length, device=query.device), starts[1:].to(query.device), right=True)
    same = (at[:, None] == at[None, :])[None, None]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if is_real:
        return mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, torch.finfo(mask.dtype).min)
    if type(mask) is DescribedMask:
        return mask.tensor() & same
    return same & Described(length, length, 0, None, 0).tensor(query.device) if causal else same


def _described(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: DescribedMask,
    scaling: float | None,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention under a mask in numbers."""
    m: Described = mask.described
    queries, keys = query.shape[2], key.shape[2]
    if queries != m.queries or keys != m.keys or query.shape[0] != key.shape[0]:
        # The model has cut its tensors or its mask: what fits together is decided by the real mask.
        real = mask.tensor()
        if real.shape[-2] != queries or real.shape[-1] < keys:
            raise InvalidCallError(
                f"attention of {queries} queries and {keys} keys was given a mask for {m.queries} and {m.keys}",
                code="WRONG_SHAPE",
                hint='load the model with attn_implementation="sdpa"',
            )
        out: torch.Tensor = (
            scaled_dot_product_attention(query, key, value, real[..., :keys], scale=scaling, enable_gqa=True)
            if not softcap and sinks is None
            else attention(
                query,
                key,
                value,
                False,
                scaling,
                attn_mask=real[..., :keys],
                softcap=softcap,
                sinks=sinks,
                layout="BHSD",
            )
        )
        return out
    earlier, later = m.earlier, m.later
    if later is None and earlier is None:
        return attention(query, key, value, False, scaling, softcap=softcap, sinks=sinks, layout="BHSD")
    # Keys from here on are after the last query's position: room in a static cache.
    end = m.offset + queries
    if later == 0 and m.offset >= 0 and end <= keys:
        # The first key that the first query may attend to.
        begin = 0 if earlier is None else max(m.offset - earlier, 0)
        if end != keys or begin:
            key, value = key[:, :, begin:end], value[:, :, begin:end]
        if queries == 1:
            return attention(query, key, value, False, scaling, softcap=softcap, sinks=sinks, layout="BHSD")
        if earlier is None or earlier >= end - begin - 1:
            return attention(query, key, value, True, scaling, softcap=softcap, sinks=sinks, layout="BHSD")
        return attention(query, key, value, True, scaling, window=earlier, softcap=softcap, sinks=sinks, layout="BHSD")
    if m.offset == keys - queries >= 0 and earlier is not None and later is not None:
        if earlier >= keys and later >= keys:
            return attention(query, key, value, False, scaling, softcap=softcap, sinks=sinks, layout="BHSD")
        return attention(
            query, key, value, False, scaling, window=(earlier, later), softcap=softcap, sinks=sinks, layout="BHSD"
        )
    return attention(
        query, key, value, False, scaling, attn_mask=mask.tensor(), softcap=softcap, sinks=sinks, layout="BHSD"
    )


def _masked(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    is_causal: bool | None,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention under a mask in memory, or none."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is not None:
        if mask.shape[-1] > keys:
            mask = mask[..., :keys]
        if mask.dtype != torch.bool and mask.dtype != query.dtype:
            mask = mask.to(query.dtype)
        causal = False
    else:
        causal = bool(queries > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal))
        if causal and keys > queries:
            # An empty static cache: the keys after the last query's are not written yet.
            key, value = key[:, :, :queries], value[:, :, :queries]
    if query.shape[0] == key.shape[0] and (not causal or keys >= queries):
        return attention(
            query, key, value, causal, scaling, attn_mask=mask, softcap=softcap, sinks=sinks, layout="BHSD"
        )
    if softcap or sinks is not None:
        raise _refused(module, f"{'softcap' if softcap else 'attention sinks'} with a broadcast batch")
    return scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scaling, enable_gqa=True)


def _merged(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    position_bias: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    indices: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """Attention whose mask must be put together first, or with dropout."""
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    real: torch.Tensor | None = mask.tensor() if isinstance(mask, DescribedMask) else mask
    if real is None and causal and queries > 1:
        real = Described(queries, keys, 0, None, 0).tensor(query.device)
    elif real is not None and real.shape[-1] > keys:
        real = real[..., :keys]
    if indices is not None:
        chosen = torch.zeros((query.shape[0], queries, keys), dtype=torch.bool, device=query.device)
        chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
        if real is None:
            real = chosen
        else:
            real = (
                real & chosen if real.dtype == torch.bool else real.masked_fill(~chosen, torch.finfo(query.dtype).min)
            )
    if position_bias is not None:
        bias = position_bias[..., :keys]
        if real is None:
            real = bias
        elif real.dtype == torch.bool:
            real = torch.where(real, bias, torch.finfo(query.dtype).min)
        else:
            real = real + bias
        real = real.to(query.dtype)
    if not dropout:
        out = _masked(module, query, key, value, real, scaling, False, softcap or 0.0, sinks)
        return out.transpose(1, 2).contiguous(), None
    # The draws are torch's, so that a seed means what it means for "sdpa".
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) if groups > 1 else t for t in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, real, dropout, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _usable(mask: Any, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether a mask in memory is one that `lz.attention` has the same meaning for."""
    if mask is None:
        return True
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.shape[-1] < key.shape[2]:
        return False
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return False
    return mask.shape[2] in (1, query.shape[2]) and mask.shape[1] in (1, query.shape[1])


def _form(mask: Any) -> str:
    if isinstance(mask, torch.Tensor):
        return f"{list(mask.shape)} of {str(mask.dtype).removeprefix('torch.')}"
    return type(mask).__name__


def _unknown(module: Any, given: dict[str, Any]) -> str | None:
    """An argument that the modeling file itself gives to attention functions and that is not known here.

    Refused where the model's own function does not know it either: the result would be that of a call without it.
    """
    source = written(type(module).__module__)
    names = [n for n, x in given.items() if n not in _KNOWN and x is not None and n in source.arguments]
    own = inspect.signature(function).parameters if (function := _eager_of(type(module))) is not None else {}
    for name in names:
        if name not in own:
            raise _refused(module, f"the argument {name}")
    return next(iter(names), None)


def own_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    dropout: float,
    scaling: float | None,
    causal: bool,
    why: str,
    given: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention by the ``eager_attention_forward`` of the model's own file, with a warning, once for each reason."""
    function = _eager_of(type(module))
    if function is None:
        raise _refused(module, f"{why}, and its file has no eager_attention_forward")
    if not torch.compiler.is_compiling() and (type(module).__qualname__, why) not in _said:
        _said.add((type(module).__qualname__, why))
        warn(f"{type(module).__name__}: {why} is not served by LayerZero; the model's own attention runs")
    if mask is None and causal and query.shape[2] > 1:
        mask = Described(query.shape[2], key.shape[2], 0, None, 0).tensor(query.device)
    if isinstance(mask, torch.Tensor):
        mask = additive(mask, query.dtype)
    if scaling is not None:
        given["scaling"] = scaling
    result: tuple[torch.Tensor, torch.Tensor | None] = function(
        module, query, key, value, mask, dropout=dropout, **given
    )
    return result


def _eager_of(kind: type) -> Any:
    """The attention function that a model's file falls back on; of a derived class, that of its base's file."""
    for base in kind.__mro__:
        function = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    return None


def _refused(module: Any, what: str) -> InvalidCallError:
    hint = 'load this model with attn_implementation="sdpa"; lz.optimize(model) still replaces its other parts'
    return unsupported(f"{type(module).__name__}: LayerZero's attention", what, hint)
