"""Finding FlashInfer: its version, its functions, and what compiles its kernels."""

from importlib import import_module
from typing import Any

from ..library import Library
from . import attention, cascade, mla, norm, paged, rope, sampling, sparse

_MODULES: tuple[Any, ...] = (attention, paged, cascade, mla, sparse, norm, rope, sampling)
_library = Library("flashinfer", own_version=True)


def detect() -> str:
    """The version of FlashInfer; raises `ImportError` where it or a function is missing, `RuntimeError` where nothing
    can compile its kernels."""
    version = _library.find()
    _check_compiler()
    try:
        for module in _MODULES:
            module.bind(import_module("flashinfer"))
    except AttributeError as error:
        raise ImportError(f"flashinfer {version} has no {error.name}; install 0.6 or newer") from error
    return version


def _check_compiler() -> None:
    """Its kernels are compiled on first use, unless a package brings them or they were compiled before."""
    environment = import_module("flashinfer.jit.env")
    if environment.has_flashinfer_jit_cache():
        return
    try:
        import_module("flashinfer.jit.cpp_ext").get_cuda_path()
    except RuntimeError as error:
        folders = (environment.FLASHINFER_AOT_DIR, environment.FLASHINFER_JIT_DIR)
        if not any(any(folder.glob("*/*.so")) for folder in folders):
            why = "flashinfer compiles its kernels on first use, and there is no CUDA toolkit"
            raise RuntimeError(f"{why}; install one, or flashinfer-jit-cache") from error
