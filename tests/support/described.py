"""Asks the engine about devices that are not here, with backends whose libraries are not here either."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero import _native, backend_files, loading
from layerzero.backends import BACKENDS

FOLDER = Path(lz.__file__).parent / "backends"
UNPROVEN_VARIABLE = "LAYERZERO_BACKENDS_UNPROVEN"
#: SM versions of described devices.
SM = {"t4": 75, "a100": 80, "l40s": 89, "h100": 90, "h200": 90, "b200": 100}


def adapter(backend: str) -> ModuleType:
    """The adapter of a backend."""
    return importlib.import_module(f"{backend_files.package(backend)}.adapter")


@contextmanager
def registered(backend: str, version: str) -> Iterator[ModuleType]:
    """A backend as if its library were installed in that version; afterwards as it was."""
    lz.list_kernels()
    module = adapter(backend)
    document = backend_files.folder(backend) / "capabilities.json"
    with unproven(backend):
        lz.register_backend(document, module.KERNELS, version=version)
        try:
            yield module
        finally:
            for kernel in module.KERNELS:
                lz.unregister_kernel(kernel)
            if backend in BACKENDS:
                loading._load_builtin(backend)


@contextmanager
def unproven(*backends: str) -> Iterator[None]:
    """Backends that were never run may be used: in this process, and by the command line."""
    before, variable = loading.setting("backends.unproven"), os.environ.get(UNPROVEN_VARIABLE)
    names = [*before, *backends]
    lz.configure(backends__unproven=names)
    os.environ[UNPROVEN_VARIABLE] = ",".join(names)
    try:
        yield
    finally:
        lz.configure(backends__unproven=before or None)
        if variable is None:
            del os.environ[UNPROVEN_VARIABLE]
        else:
            os.environ[UNPROVEN_VARIABLE] = variable


@contextmanager
def library_itself(*backends: str) -> Iterator[str]:
    """Backends of one library with the library itself, on this machine's GPU; gives its version. Skips where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    try:
        version: str = adapter(backends[0]).detect()
    except (ImportError, RuntimeError) as error:
        pytest.skip(str(error))
    with ExitStack() as stack:
        for backend in backends:
            stack.enter_context(registered(backend, version))
        yield version


def command(*arguments: str) -> str:
    """What the command line prints."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as printed:
        ours = os.dup(1)
        os.dup2(printed.fileno(), 1)
        try:
            _native.cli(["layerzero", *arguments])
        finally:
            os.dup2(ours, 1)
            os.close(ours)
        printed.seek(0)
        return printed.read().decode()


def ask(
    op: str,
    device: str,
    shapes: Mapping[str, Sequence[int]],
    dtype: str = "float16",
    *flags: str,
    dtypes: Mapping[str, str] | None = None,
    strides: Mapping[str, Sequence[int]] | None = None,
    layout: str | None = None,
    **params: Any,
) -> dict[str, list[str]]:
    """The reasons against each kernel of the operation, as lines `[CODE] message`; none for one that takes the call."""
    # Of the libraries that are not registered here none is assumed to be installed: only those are asked about.
    arguments = ["explain", "--json", "--op", op, "--device", device, "--dtype", dtype, "--assume", "torch", *flags]
    for name, sizes in shapes.items():
        arguments += ["--shape", f"{name}={'x'.join(map(str, sizes))}"]
    for name, other in (dtypes or {}).items():
        arguments += ["--input-dtype", f"{name}={other}"]
    for name, steps in (strides or {}).items():
        arguments += ["--strides", f"{name}={'x'.join(map(str, steps))}"]
    for name, value in params.items():
        arguments += ["--param", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
    if layout is not None:
        arguments += ["--layout", layout]
    answer = command(*arguments)
    try:
        candidates = json.loads(answer)["candidates"]
    except (ValueError, KeyError) as error:
        raise AssertionError(f"{arguments}: {answer}") from error
    return {c["kernel_id"]: [f"[{r['code']}] {r['message']}" for r in c["reasons"]] for c in candidates}


def takes(answer: Mapping[str, list[str]], prefix: str) -> list[str]:
    """The kernels of that name that take the call."""
    return sorted(name for name, reasons in answer.items() if name.startswith(prefix) and not reasons)


def fits(kernel: str, keywords: Mapping[str, Any]) -> bool:
    """Whether a kernel takes a call made with these arguments; one of another function does not."""
    try:
        return bool(lz.validate(kernel, **keywords)[0])
    except lz.errors.ArgumentTypeError:
        return False
