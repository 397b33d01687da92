"""Why torch's own attention function would not use one of its implementations, in torch's words.

LayerZero decides by what its kernels declare. torch decides by ``torch.backends.cuda.can_use_*``, which say why not in warnings.
``lz.explain`` shows both for calls on a CUDA device.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: torch's implementations, by the names of ``torch.nn.attention.SDPBackend``, and the functions that judge them.
JUDGES = {
    "FLASH_ATTENTION": "can_use_flash_attention",
    "EFFICIENT_ATTENTION": "can_use_efficient_attention",
    "CUDNN_ATTENTION": "can_use_cudnn_attention",
}
#: A warning of torch's C++ code on the error stream: "[W1118 08:20:03 sdp_utils.cpp:473] Warning: … (function check_…)".
_LINE = re.compile(r"^\[W[^\]]*\] (?:Warning: )?(?P<text>.*?)(?: \(function [\w:~<>]+\))?$")
#: What torch's warnings end in.
_TRIGGERED = re.compile(r"\s*\(Triggered internally at .*\)$", re.DOTALL)
_lock = threading.Lock()


def refusals(query: Any, key: Any, value: Any, **given: Any) -> dict[str, list[str]]:
    """Torch's reasons, by implementation; those that torch would use are left out. Tensors of the order batch, heads,
    sequence, element.

    Args:
        query: on a CUDA device, as are the others.
        key: the keys.
        value: the values.
        given: ``attn_mask``, ``dropout_p`` and ``causal`` of the call.
    """
    import torch

    grouped = bool(query.shape[1] != key.shape[1])
    mask, dropout, causal = given.get("attn_mask"), given.get("dropout_p") or 0.0, bool(given.get("causal", True))
    # A single query is the last position, from which causal takes nothing; torch would align it top-left.
    causal = causal and query.shape[2] != 1
    params = torch.backends.cuda.SDPAParams(query, key, value, mask, dropout, causal, grouped)
    found = {}
    for name, judge in JUDGES.items():
        can_use: Callable[[Any, bool], bool] = getattr(torch.backends.cuda, judge)
        if not can_use(params, False):
            found[name] = _said(can_use, params)
    return found


def of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, list[str]]:
    """The same of a call of ``lz.attention`` or ``lz.cross_attention``; empty where torch has no say: the tensors are elsewhere,
    have no memory, or are not four-dimensional."""
    from layerzero import layouts

    if "torch" not in sys.modules:
        return {}
    import torch

    named = {**dict(zip(("query", "key", "value", "causal"), args, strict=False)), **kwargs}
    for other, name in (("q", "query"), ("k", "key"), ("v", "value"), ("is_causal", "causal")):
        if other in named:
            named[name] = named.pop(other)
    tensors: list[Any] = [named.get(name) for name in ("query", "key", "value")]
    if not all(type(t) in (torch.Tensor, torch.nn.Parameter) and t.is_cuda and t.dim() == 4 for t in tensors):
        return {}
    if (named.get("layout") or layouts.here("default_layout")) != "BHSD":
        tensors = [tensor.transpose(1, 2) for tensor in tensors]
    chosen = {name: named[name] for name in ("attn_mask", "dropout_p", "causal") if name in named}
    return refusals(*tensors, **chosen)


def _said(can_use: Callable[[Any, bool], bool], params: Any) -> list[str]:
    """What torch says when it is asked why not."""
    with warnings.catch_warnings(record=True) as caught, _lock, _error_stream() as lines:
        warnings.simplefilter("always")
        can_use(params, True)
    texts = [_TRIGGERED.sub("", str(warning.message)) for warning in caught]
    for line in lines:
        match = _LINE.match(line)
        if match is not None:
            texts.append(match["text"])
        elif line:
            # Somebody else's, which came meanwhile.
            sys.stderr.write(line + "\n")
    return list(dict.fromkeys(text.strip() for text in texts)) or ["it gives no reason"]


@contextmanager
def _error_stream() -> Iterator[list[str]]:
    """The lines that are written to the process's error stream inside: warnings of torch's C++ code go there where no Python
    function of torch's is on the way."""
    lines: list[str] = []
    try:
        kept = os.dup(2)
    except OSError:
        yield lines
        return
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()
