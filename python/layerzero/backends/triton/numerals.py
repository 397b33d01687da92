# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""What kernels ask of numbers."""

import triton
import triton.language as tl


@triton.jit
def is_nan(x):
    """Whether it is no number."""
    return tl.abs(x) != tl.abs(x)
