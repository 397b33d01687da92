"""On a GPU, explanations say why torch would not use its own attention kernels."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def tensors(dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(*shape, dtype=dtype, device="cuda") for _ in range(3))


@pytest.mark.parametrize(
    ("dtype", "shape", "given", "backend", "word"),
    [
        (torch.float32, (1, 4, 64, 64), {}, "FLASH_ATTENTION", "dtype"),
        (torch.float16, (1, 4, 64, 7), {}, "EFFICIENT_ATTENTION", "last dimension"),
        (torch.float16, (1, 4, 64, 512), {}, "CUDNN_ATTENTION", "head"),
    ],
)
def test_torchs_reasons(
    dtype: torch.dtype, shape: tuple[int, ...], given: dict[str, Any], backend: str, word: str, capfd: Any
) -> None:
    report = lz.explain("attention", *tensors(dtype, *shape), layout="BHSD", **given)
    reasons = report.torch_refusals[backend]
    assert any(word in reason.lower() for reason in reasons), reasons
    assert f"{backend}: " in str(report)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_what_sdpa_kernel_allows_runs(backend: str, dtype: torch.dtype) -> None:
    """Served where torch serves it, refused where torch refuses it, and by the same implementation."""
    q, k, v = tensors(dtype, 2, 8, 128, 64)
    lz.attention(q, k, v, layout="BHSD")
    with sdpa_kernel(getattr(SDPBackend, backend)):
        try:
            expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        except RuntimeError:
            with pytest.raises(lz.NoKernelFoundError):
                lz.attention(q, k, v, layout="BHSD")
            return
        found = lz.attention(q, k, v, layout="BHSD")
        chosen = lz.which("attention", q, k, v, layout="BHSD").kernel_id
        assert torch.allclose(found.float(), expected.float(), atol=2e-3)
    named = {"FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "efficient", "CUDNN_ATTENTION": "cudnn"}
    if backend in named:
        assert named[backend] in chosen.split(".")
    else:
        assert chosen.startswith("torch.")
