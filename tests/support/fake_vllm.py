"""vLLM as far as LayerZero's plugin meets it: the classes it extends, of 0.33, and the functions it calls, of 0.17.

The signatures are those of `testdata/signatures/vllm*.json` (tests/backends/test_signatures.py). What the functions do is what
vLLM's do, for what is tested.
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
from typing import Any, ClassVar, Generic, TypeVar

import torch
from layerzero import integrations

VERSION = "0.33.0"
T = TypeVar("T")


class AttentionType(str, enum.Enum):
    """What attends to what."""

    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


@dataclass(frozen=True)
class MultipleOf:
    """A page size."""

    base: int


class AttentionCGSupport(enum.Enum):
    """What may be captured."""

    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionMetadata:
    """A batch."""


class AttentionBackend(ABC):
    """What a backend is."""

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """Its name."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[Any]:
        """Attention of a layer."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[Any]:
        """What describes a batch."""


class AttentionImpl(ABC, Generic[T]):
    """Attention of a layer."""

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        """Sizes."""

    @abstractmethod
    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: T,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step."""


class AttentionMetadataBuilder(ABC, Generic[T]):
    """Describes batches."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None

    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    def _init_reorder_batch_threshold(
        self,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        self.reorder_batch_threshold = reorder_batch_threshold

    @abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> T:
        """One batch."""

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> T:
        """A batch that is captured."""
        return self.build(0, common_attn_metadata)


def split_decodes_and_prefills(
    common_attn_metadata: Any,
    decode_threshold: int = 1,
    require_uniform: bool = False,
) -> tuple[int, int, int, int]:
    """(decodes, prefills, tokens of decodes, tokens of prefills) of a batch whose decodes come first."""
    given = common_attn_metadata
    if given.max_query_len <= decode_threshold:
        return given.num_reqs, 0, given.num_actual_tokens, 0
    starts = given.query_start_loc_cpu
    longer = (starts[1:] - starts[:-1] > decode_threshold).nonzero()
    first = int(longer[0]) if len(longer) else given.num_reqs
    tokens = int(starts[first])
    return first, given.num_reqs - first, tokens, given.num_actual_tokens - tokens


class Registered:
    """A member of the registry."""

    def __init__(self, name: str, path: str | None) -> None:
        self.name, self._path = name, path
        self.override: str | None = None

    def get_path(self, include_classname: bool = True) -> str:
        """Where its class is."""
        path = self.override or self._path
        if not path:
            raise ValueError(f"Backend {self.name} must be registered before use")
        return path if include_classname else path.rpartition(".")[0]

    def is_overridden(self) -> bool:
        """Whether a plugin has changed it."""
        return self.override is not None


def register_backend(
    backend: Any, class_path: str | None = None, is_mamba: bool = False
) -> Callable[[type[Any]], type[Any]]:
    """Changes where a backend's class is."""
    backend.override = class_path
    return lambda cls: cls


def registry(names_of_plugins: bool) -> Any:
    """``AttentionBackendEnum``; old versions have no names of plugins."""
    members = {"CPU_ATTN": Registered("CPU_ATTN", "vllm.own.Cpu"), "CUSTOM": Registered("CUSTOM", None)}
    found = SimpleNamespace(__members__=members, **members)
    if names_of_plugins:

        def register(name: str, value: str) -> Registered:
            if name in members:
                raise ValueError(f"Backend {name} already exists")
            members[name] = Registered(name, value)
            setattr(found, name, members[name])
            return members[name]

        found.register = register
    return found


class IrOp:
    """An IR operation: its native function, and those of providers."""

    def __init__(self, native: Callable[..., Any]) -> None:
        self.native = native
        self.impls: dict[str, Any] = {"native": native}
        self.takes: dict[str, Callable[..., bool] | None] = {}

    def register_impl(
        self,
        provider: str,
        *,
        supported: bool = True,
        supports_args: Callable[..., bool] | None = None,
        inplace: bool = False,
    ) -> Callable[[Callable[..., Any]], Any]:
        """A provider's function, whose schema must be the native one's."""

        def registered(function: Callable[..., Any]) -> Callable[..., Any]:
            schemas = [torch.library.infer_schema(one, mutates_args=()) for one in (self.native, function)]
            if provider in self.impls or schemas[0] != schemas[1]:
                raise ValueError(f"{provider}: {schemas[1]} is not {schemas[0]}, or is registered twice")
            self.impls[provider], self.takes[provider] = function, supports_args
            return function

        return registered


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """The definition of vLLM's operation."""
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (normed if weight is None else normed * weight.double()).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of vLLM's operation."""
    total = x.double() + x_residual.double()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    return (normed if weight is None else normed * weight.double()).to(x.dtype), total.to(x.dtype)


class KVCacheLayout(enum.Enum):
    """Memory orders of layer, page, head, token, content."""

    LBHNC = (0, 1, 2, 3, 4)
    LBNHC = (0, 1, 3, 2, 4)


#: What ``vllm.config.get_current_vllm_config_or_none`` gives.
current: list[Any] = [None]


def get_current_vllm_config_or_none() -> Any:
    """The configuration of the engine that is built now."""
    return current[0]


class CPUAttentionBackend:
    """vLLM's own backend for CPUs."""


@contextmanager
def installed(version: str = VERSION, names_of_plugins: bool = True, ir: bool = True) -> Iterator[SimpleNamespace]:
    """vLLM can be imported inside, and LayerZero's modules for it are imported anew."""
    known = registry(names_of_plugins)
    ops = SimpleNamespace(rms_norm=IrOp(rms_norm), fused_add_rms_norm=IrOp(fused_add_rms_norm))
    here = dict(globals())
    backend = {name: here[name] for name in BACKEND_NAMES}
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.config": {"get_current_vllm_config_or_none": get_current_vllm_config_or_none},
        "vllm.v1": {},
        "vllm.v1.kv_cache_interface": {"KVCacheLayout": KVCacheLayout},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": backend,
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.utils": {"split_decodes_and_prefills": split_decodes_and_prefills},
        "vllm.v1.attention.backends.registry": {"AttentionBackendEnum": known, "register_backend": register_backend},
        "vllm.v1.attention.backends.cpu_attn": {"CPUAttentionBackend": CPUAttentionBackend},
    }
    if ir:
        contents["vllm.ir"] = {"ops": ops}
    ours = [f"layerzero.integrations.{name}" for name in ("vllm", "vllm.attention", "vllm.ir")]
    held = integrations.__dict__.pop("vllm", None)
    before = {name: sys.modules.pop(name, None) for name in [*contents, *ours, "vllm.ir"]}
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
        yield SimpleNamespace(registry=known, ops=ops)
    finally:
        current[0] = None
        for name, module_before in before.items():
            sys.modules.pop(name, None)
            if module_before is not None:
                sys.modules[name] = module_before
        integrations.__dict__.pop("vllm", None)
        if held is not None:
            integrations.__dict__["vllm"] = held


BACKEND_NAMES = (
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionType",
    "MultipleOf",
)
