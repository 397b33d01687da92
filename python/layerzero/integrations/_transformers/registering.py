"""LayerZero's name among the attention implementations of transformers."""

from __future__ import annotations

import re

from layerzero.errors import ConfigurationError

__all__ = ["NAME", "register_with_transformers"]

#: What ``attn_implementation=`` is called. transformers searches names for "sdpa", "flash" and "flex_attention".
NAME = "layerzero"

#: The first version with mask functions by name.
OLDEST = (4, 53)


def register_with_transformers() -> None:
    """Makes ``attn_implementation="layerzero"`` known to transformers. Calling it again changes nothing.

    Models that do not name it are not affected.

    Raises:
        ConfigurationError: transformers is not installed, or older than 4.53.
    """
    _check()
    # A name without a mask function would silently get no mask, so it comes first.
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from layerzero.integrations._transformers.attention import attend
    from layerzero.integrations._transformers.masks import mask

    AttentionMaskInterface.register(NAME, mask)
    AttentionInterface.register(NAME, attend)


def _check() -> None:
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError(
            f"transformers cannot be imported: {error}",
            code="MISSING_LIBRARY",
            hint="install it: pip install transformers",
        ) from error
    version = tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:2])
    if version < OLDEST:
        raise ConfigurationError(
            f"transformers {transformers.__version__} has no mask functions by name, which attention needs",
            code="OLD_TRANSFORMERS",
            hint=f"install transformers {OLDEST[0]}.{OLDEST[1]} or newer",
        )
