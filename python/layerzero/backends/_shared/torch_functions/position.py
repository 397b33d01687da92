"""Embeddings and positional encodings."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..blocks import ELEMENTS, HALF, blocks
from ..data_errors import bad_data, bad_index

_embedding = torch._C._VariableFunctions.embedding
_embedding_backward = torch.ops.aten.embedding_dense_backward


def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table."""
    try:
        return _embedding(weight, indices)
    except IndexError:
        raise bad_index("indices", indices, weight.shape[0]) from None


def embedding_wide_gradient(indices: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table of half-width floats; the gradient of a row is summed in float32 and rounded once."""
    try:
        output: Tensor = _WideGradient.apply(weight, indices)  # type: ignore[no-untyped-call]
        return output
    except IndexError:
        raise bad_index("indices", indices, weight.shape[0]) from None


class _WideGradient(torch.autograd.Function):
    """torch's embedding, whose own backward adds the gradients of a row one by one in the dtype of the table."""

    @staticmethod
    def forward(weight: Tensor, indices: Tensor) -> Tensor:
        return _embedding(weight, indices)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        weight, indices = inputs
        ctx.rows, ctx.dtype = weight.shape[0], weight.dtype
        ctx.save_for_backward(indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A float32 copy of the whole table would be large: sums are made for the rows that were looked up.
        rows, places = ctx.saved_tensors[0].long().unique(return_inverse=True)
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        sums = _embedding_backward(wide, places, rows.shape[0], -1, False).to(ctx.dtype)
        table = torch.zeros((ctx.rows, grad.shape[-1]), dtype=ctx.dtype, device=grad.device)
        return table.index_copy(0, rows, sums), None


def rope(input: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, layout: str) -> Tensor:
    """Rotary embedding, composed; rounded once."""
    head_dim, pairs = input.shape[-1], _pairs(input, cos)
    if positions is None and not interleaved and 2 * pairs == head_dim and input.dtype == cos.dtype == torch.float32:
        return _rope_of_halves(input, cos, sin, layout)
    work = torch.float64 if input.dtype == torch.float64 else torch.float32
    cos = _at_positions(cos[:, :pairs], input, positions, layout).to(work)
    sin = _at_positions(sin[:, :pairs], input, positions, layout).to(work)
    rotated = input[..., : 2 * pairs].to(work)
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :pairs], rotated[..., pairs:]
    turned = (first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin)
    output = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    output = output.to(input.dtype)
    return output if 2 * pairs == head_dim else torch.cat((output, input[..., 2 * pairs :]), -1)


def _rope_of_halves(input: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """What one writes: both halves of every head are turned, by tables in the order of the tokens."""
    first, second = input.chunk(2, -1)
    pairs = first.shape[-1]
    if cos.shape[-1] != pairs:
        cos, sin = cos[:, :pairs], sin[:, :pairs]
    cos, sin = (_at_positions(table, input, None, layout) for table in (cos, sin))
    # Not in place: an intermediate result may be wanted for gradients.
    turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    return torch.cat(turned, -1)


def rope_turned(
    input: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, layout: str
) -> Tensor:
    """Rotary embedding in the memory of the result, piece by piece. Interleaved pairs are complex numbers, and turning
    them is one product."""
    pairs, work = _pairs(input, cos), torch.float64 if input.dtype == torch.float64 else torch.float32
    if pairs == 0:
        return input.clone(memory_format=torch.contiguous_format)
    cos, sin = (_at_positions(table[:, :pairs], input, positions, layout).to(work) for table in (cos, sin))
    if interleaved:
        return _turned(input, _complex_product, work, torch.complex(cos, sin))
    return _turned(input, _halves_product, work, cos, sin)


def _pairs(input: Tensor, cos: Tensor) -> int:
    """How many pairs are turned. Tables as wide as a head hold everything twice."""
    head_dim, rot = input.shape[-1], cos.shape[-1]
    return head_dim // 2 if rot == head_dim else rot


def _turned(input: Tensor, turn: Callable[..., object], work: torch.dtype, *tables: Tensor) -> Tensor:
    """The input with its pairs turned piece by piece; what is left of a head stays as it is."""
    width, head_dim = 2 * tables[0].shape[-1], input.shape[-1]
    output = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    rotated, turned = input, output
    if width < head_dim:
        rotated, turned = input[..., :width], output[..., :width]
        output[..., width:] = input[..., width:]
    if input.numel() > ELEMENTS:
        tables = tuple(table.expand(*input.shape[:-1], -1) for table in tables)
    in_place = input.dtype == work and width == head_dim
    for given, result, *parts in blocks(rotated, turned, *tables, whole=1):
        x = given.to(work)
        out = result if in_place else torch.empty(x.shape, dtype=work, device=x.device)
        turn(x, out, *parts)
        if not in_place:
            result.copy_(out)
    return output


def _complex_product(x: Tensor, out: Tensor, turn: Tensor) -> None:
    shape = *x.shape[:-1], turn.shape[-1], 2
    given = x.view(shape)
    if given.storage_offset() % 2 or given.stride(-1) != 1 or any(stride % 2 for stride in given.stride()[:-1]):
        # Complex numbers lie two floats apart.
        given = torch.empty(shape, dtype=x.dtype, device=x.device).copy_(given)
    torch.mul(torch.view_as_complex(given), turn, out=torch.view_as_complex(out.view(shape)))


def _halves_product(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor) -> None:
    shape = *x.shape[:-1], 2, cos.shape[-1]
    torch.mul(x.view(shape), cos.unsqueeze(-2), out=out.view(shape))
    first, second = x.chunk(2, -1)
    turned_first, turned_second = out.chunk(2, -1)
    turned_first.addcmul_(second, sin, value=-1.0)
    turned_second.addcmul_(first, sin)


def _at_positions(table: Tensor, input: Tensor, positions: Tensor | None, layout: str) -> Tensor:
    """The rows of a table that belong to the tokens of the input, broadcast over its heads."""
    seq = input.shape[2] if layout == "BHSD" else input.shape[-3]
    if positions is None:
        if seq > table.shape[0]:
            raise bad_data(f"positions[{table.shape[0]}]", table.shape[0], _beyond(table))
        rows = table if seq == table.shape[0] else table[:seq]
    else:
        try:
            rows = table.index_select(0, positions.reshape(-1)).reshape(*positions.shape, table.shape[1])
        except IndexError:
            raise bad_index("positions", positions, table.shape[0]) from None
    if layout == "NHD":
        if rows.dim() == 3:
            if rows.shape[0] != 1:
                raise bad_data("the number of rows of positions", rows.shape[0], "but the input is one sequence")
            rows = rows[0]
        return rows[:, None]
    return rows.unsqueeze(-3 if layout == "BHSD" else -2)


def _beyond(table: Tensor) -> str:
    return f"but cos and sin have rows 0 to below {table.shape[0]}"


def alibi(slopes: Tensor, seq_q: int, seq_k: int) -> Tensor:
    """Linear bias by distance."""
    dtype = slopes.dtype
    if dtype in HALF:
        # Distances are whole numbers that these dtypes do not have.
        slopes = slopes.float()
    keys = torch.arange(seq_k, dtype=slopes.dtype, device=slopes.device)
    queries = keys
    if seq_q < seq_k:
        queries = keys[seq_k - seq_q :]
    elif seq_q > seq_k:
        queries = torch.arange(seq_k - seq_q, seq_k, dtype=keys.dtype, device=keys.device)
    biases = slopes.neg()[:, None, None] * (keys - queries[:, None]).abs_()
    return biases.to(dtype) if dtype in HALF else biases


def alibi_unfolded(slopes: Tensor, seq_q: int, seq_k: int) -> Tensor:
    """The same as windows into one line of biases: only the distance counts, and few of them differ."""
    if seq_q == 0:
        return slopes.new_zeros(slopes.shape[0], 0, seq_k)
    work = torch.float64 if slopes.dtype == torch.float64 else torch.float32
    line = torch.arange(1 - seq_k, seq_q, device=slopes.device).abs().to(work)
    biases = (slopes.to(work)[:, None] * -line).to(slopes.dtype)
    # The windows begin with the last query's.
    return biases.unfold(1, seq_k, 1).flip(1).contiguous()
