"""LayerZero inside SGLang: an attention backend.

SGLang calls :func:`plugin` by itself in each of its processes, because the package names it as a plugin (the entry point
``layerzero`` of the group ``sglang.srt.plugins``). Nothing changes until it is asked for::

    python -m sglang.launch_server --model-path MODEL --attention-backend layerzero

Importing this module imports nothing of SGLang.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from layerzero.errors import ConfigurationError

__all__ = ["NAME", "plugin", "register"]

#: What ``--attention-backend`` is called.
NAME = "layerzero"


def plugin() -> None:
    """What SGLang calls in each of its processes: :func:`register`, where this version of SGLang allows it."""
    try:
        register()
    except ConfigurationError as error:
        # SGLang works as if LayerZero were not installed.
        logging.getLogger("layerzero").warning("LayerZero is not registered with SGLang: %s", error)


def register() -> None:
    """Makes ``--attention-backend layerzero`` known to SGLang. Calling it again changes nothing.

    Raises:
        ConfigurationError: SGLang is not installed, or has no registry of attention backends.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ConfigurationError(
            "SGLang is not installed", code="MISSING_LIBRARY", hint="install it: pip install sglang"
        )
    try:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
        from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    except ImportError as error:
        raise ConfigurationError(
            f"SGLang has another interface for attention backends: {error}",
            code="OLD_SGLANG",
            hint="install SGLang 0.5.23, which this was written for",
        ) from error
    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(_backend)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def _backend(runner: Any) -> Any:
    from layerzero.integrations.sglang.attention import LayerZeroAttnBackend

    return LayerZeroAttnBackend(runner)
