"""torchao (`torchao`), read from the sources of 0.19.

Not run on hardware: tested against functions of the same signatures.

Only what gives the contract's results to the last bit is used, and that is the way back, without zero points and in
float32: `dequantize_affine` forms one product, rounded once. The rest differs:

- `quantize_affine` multiplies by the inverse of a scale, where the contract divides: values near a tie go the other way.
- `choose_qparams_affine` forms scales in the dtype of the input, and its NaN is that of any element.
- `_choose_scale_float8` lets a NaN spoil its group, and `_quantize_affine_float8` divides nothing by nothing in groups of
  zeros, and rounds quotients to float32 before it rounds them to eight bits.
- `to_mx` (mxfp4) gives groups of zeros a scale of 2^-127, and those with a NaN or an infinity no number at all.
- `nvfp4_quantize` has a smallest scale, and multiplies by inverses.
- `dequantize_affine` takes values that lie in bytes of their own and subtracts zero points in the dtype of the result;
  results narrower than float32 are rounded twice. Its sub-byte formats are unsigned.
- the 4-bit floats come back from tensors that carry scales in E8M0 or E4M3, where the contract has float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.kernels import direct

from ..._shared.library import Library

_library = Library("torchao", modules={"torchao.quantization.quant_primitives": ("dequantize_affine",)})
detect = _library.find


def _call(values: Tensor, scales: Tensor, granularity: str, group_size: int | None) -> tuple[Any, ...]:
    shape = tuple(values.shape)
    if scales.numel() == 1:
        block = shape
    else:
        # A scale of one dimension covers whole rows.
        width = (group_size or 32) if granularity == "blockwise" and scales.dim() == 2 else shape[-1]
        block = (*(1 for _ in shape[:-1]), min(width, shape[-1]))
    keywords = {"output_dtype": torch.float32}
    return _library.dequantize_affine, (values, block, scales, None, values.dtype, None, None), keywords


@direct(_call)
def dequantize(values: Tensor, scales: Tensor, granularity: str, group_size: int | None) -> Tensor:
    """Back to float32."""
    function, arguments, keywords = _call(values, scales, granularity, group_size)
    output: Tensor = function(*arguments, **keywords)
    return output


KERNELS: dict[str, Callable[..., Any]] = {"torchao.dequantize": dequantize}
