"""`torch.nn.functional.scaled_dot_product_attention`, served by LayerZero: the same arguments, the same results.

Tensors are (batch, ..., heads, sequence, head_dim) whatever layout is in force, and causal attention is aligned top-left:
query i attends to the keys up to i. It all comes down to calls of ``lz.attention`` with ``layout="BHSD"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from layerzero._native import attention

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with the arguments and the meaning of ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        query: (batch, ..., heads, queries, head_dim); leading dimensions may be missing, and are broadcast.
        key: (batch, ..., heads, keys, head_dim).
        value: (batch, ..., heads, keys, value_dim).
        attn_mask: broadcast to (batch, ..., heads, queries, keys). Of bools, True lets a query attend to a key; of
            numbers, it is added to the scores. Not together with ``is_causal``.
        dropout_p: probability that an attention weight is dropped. As in torch there is no training mode: pass 0.0 to
            evaluate a model.
        is_causal: query i attends to the keys up to i, also where there are fewer or more keys than queries.
        scale: softmax scale; 1/sqrt(head_dim) when not given.
        enable_gqa: groups of query heads share a key/value head. Required where there are fewer key/value heads, except
            where there is one, which is broadcast.
    """
    q, k, v = query.shape, key.shape, value.shape
    if q == k and k == v and attn_mask is None and len(q) == 4:
        # As many heads, queries and keys: the call most models make, told by two comparisons.
        return attention(query, key, value, is_causal, scale, dropout_p=dropout_p, layout="BHSD")
    if (
        len(q) == 4
        and q[0] == k[0] == v[0]
        and k[1] == v[1]
        and (q[1] == k[1] or enable_gqa)
        and len(k) == len(v) == 4
        and (not is_causal or q[2] == k[2])
        and (attn_mask is None or (len(attn_mask.shape) in (2, 4) and attn_mask.shape[-1] == k[2]))
    ):
        return attention(query, key, value, is_causal, scale, attn_mask=attn_mask, dropout_p=dropout_p, layout="BHSD")
    return _general(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _general(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Calls whose shapes are not those of one attention call: of other ranks, broadcast, or causal and not square."""
    rank = max(query.dim(), key.dim(), value.dim())
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise _refused(query, key, value, "every tensor needs at least two dimensions, (sequence, head_dim)")
    query, key, value = (_padded(tensor, 4) for tensor in (query, key, value))
    heads = _heads(query, key, value, enable_gqa)
    batch = _broadcast(query, key, value, [tuple(tensor.shape[:-3]) for tensor in (query, key, value)])
    query, key, value = (
        tensor.expand(*batch, count, *tensor.shape[-2:]).flatten(0, -4)
        for tensor, count in zip((query, key, value), heads, strict=True)
    )
    queries, keys = query.shape[2], key.shape[2]
    if is_causal and attn_mask is not None:
        raise _refused(query, key, value, "attn_mask and is_causal=True were both given")
    if attn_mask is not None:
        attn_mask = _mask(attn_mask, batch, keys)
    given: dict[str, Any] = {"dropout_p": dropout_p, "layout": "BHSD"}
    if not is_causal or keys == 0:
        out = attention(query, key, value, False, scale, attn_mask=attn_mask, **given)
    elif queries <= keys:
        # No query attends to a later key.
        out = attention(query, key[:, :, :queries], value[:, :, :queries], True, scale, **given)
    else:
        import torch

        # The last queries attend to every key.
        square = attention(query[:, :, :keys], key, value, True, scale, **given)
        full = attention(query[:, :, keys:], key, value, False, scale, **given)
        out = torch.cat((square, full), dim=2)
    result: Tensor = out.unflatten(0, batch) if len(batch) != 1 else out
    return result.reshape(result.shape[4 - rank :]) if rank < 4 else result


def _padded(tensor: Tensor, rank: int) -> Tensor:
    """With leading dimensions of size 1 up to a rank."""
    return tensor[(None,) * (rank - tensor.dim())] if tensor.dim() < rank else tensor


def _heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, int, int]:
    """The heads of each: as they are where they are shared by groups, else all the same."""
    q, k, v = query.shape[-3], key.shape[-3], value.shape[-3]
    if k == v and (q == k or k == 1 or (enable_gqa and k > 0 and q % k == 0)):
        return q, k, v
    if enable_gqa:
        raise _refused(query, key, value, f"{q} query heads cannot share {k} key and {v} value heads")
    (count,) = _broadcast(query, key, value, [(q,), (k,), (v,)], hint="pass enable_gqa=True if heads are shared")
    return count, count, count


def _mask(mask: Tensor, batch: tuple[int, ...], keys: int) -> Tensor:
    """A mask of rank 4, over all keys."""
    mask = _padded(mask, 4)
    if mask.shape[-1] == 1 and keys != 1:
        mask = mask.expand(*mask.shape[:-1], keys)
    if mask.dim() == 4 and len(batch) == 1:
        return mask
    if all(size == 1 for size in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*batch, *mask.shape[-3:]).flatten(0, -4)


def _broadcast(
    query: Tensor, key: Tensor, value: Tensor, shapes: list[tuple[int, ...]], hint: str | None = None
) -> tuple[int, ...]:
    """The shape that these are broadcast to."""
    rank = max(map(len, shapes))
    result = []
    for sizes in zip(*[(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes], strict=True):
        several = [size for size in sizes if size != 1]
        if several and any(size != several[0] for size in several):
            raise _refused(query, key, value, f"sizes {list(sizes)} cannot be broadcast together", hint)
        result.append(several[0] if several else 1)
    return tuple(result)


def _refused(query: Tensor, key: Tensor, value: Tensor, why: str, hint: str | None = None) -> Exception:
    from layerzero.errors import InvalidCallError

    shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in (("query", query), ("key", key), ("value", value)))
    text = f"scaled_dot_product_attention: {why} ({shapes})"
    wanted = "pass (batch, heads, sequence, head_dim), as torch.nn.functional.scaled_dot_product_attention takes them"
    return InvalidCallError(text, code="WRONG_SHAPE", hint=hint or wanted)
