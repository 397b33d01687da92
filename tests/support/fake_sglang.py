"""SGLang as far as LayerZero's plugin meets it: the class it extends, and the functions it calls, of version 0.5.23.

The signatures are those of `testdata/signatures/sglang*.json` (tests/backends/test_signatures.py).
"""

from __future__ import annotations

import enum
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from layerzero import integrations

VERSION = "0.5.23"


class ForwardMode(enum.IntEnum):
    """What a step is."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5


class AttentionBackend(ABC):
    """What a backend is."""

    def __init__(self) -> None:
        self.forward_metadata: Any = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Describes a batch."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """What graphs need."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Describes a batch before its graph is captured or replayed."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """The part of a description that is captured."""

    # SGLang's own raises: a backend whose steps are captured must have this one.
    @abstractmethod
    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of rows that fill up a batch."""

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        """One query per request."""

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        """Several queries per request."""


backends: dict[str, Callable[[Any], Any]] = {}
choices: list[str] = []


def register_attention_backend(name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """A backend by its name."""

    def registered(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        backends[name] = function
        return function

    return registered


@dataclass
class KVWriteLoc:
    """Where new tokens go."""

    loc: torch.Tensor


class MHATokenToKVPool:
    """The keys and values of all layers, one place per token. A page more than its size: padding writes to place 0."""

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, head_num: int, head_dim: int, layer_num: int
    ) -> None:
        shape = (size + page_size, head_num, head_dim)
        self.k_buffer = [torch.zeros(shape, dtype=dtype) for _ in range(layer_num)]
        self.v_buffer = [torch.zeros(shape, dtype=dtype) for _ in range(layer_num)]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """The keys of a layer."""
        return self.k_buffer[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """The values of a layer."""
        return self.v_buffer[layer_id]

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        """Writes keys and values."""
        self.k_buffer[layer.layer_id][loc_info.loc] = cache_k
        self.v_buffer[layer.layer_id][loc_info.loc] = cache_v


@contextmanager
def installed() -> Iterator[None]:
    """SGLang can be imported inside, and LayerZero's modules for it are imported anew."""
    backends.clear()
    choices.clear()
    attention = {"ATTENTION_BACKENDS": backends, "register_attention_backend": register_attention_backend}
    arguments = {"ATTENTION_BACKEND_CHOICES": choices, "add_attention_backend_choices": choices.extend}
    contents: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.layers": {},
        "sglang.srt.layers.attention": {},
        "sglang.srt.layers.attention.attention_registry": attention,
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
        "sglang.srt.server_args": arguments,
    }
    ours = ("layerzero.integrations.sglang", "layerzero.integrations.sglang.attention")
    before = {name: sys.modules.pop(name, None) for name in (*contents, *ours)}
    held = integrations.__dict__.pop("sglang", None)
    for name, members in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__dict__.update(members)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    try:
        yield
    finally:
        for name, module_before in before.items():
            sys.modules.pop(name, None)
            if module_before is not None:
                sys.modules[name] = module_before
        integrations.__dict__.pop("sglang", None)
        if held is not None:
            integrations.__dict__["sglang"] = held


def runner(pool: Any, tables: torch.Tensor, page_size: int) -> SimpleNamespace:
    """What a backend sees of SGLang's model runner."""
    return SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=tables),
        page_size=page_size,
        use_mla_backend=False,
        device="cpu",
    )
