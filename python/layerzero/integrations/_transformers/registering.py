"""LayerZero's name among the attention implementations of transformers."""

from __future__ import annotations

from layerzero.integrations.requirements import require

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
    require("transformers", OLDEST, "mask functions by name, which attention needs", code="OLD_TRANSFORMERS")
    # A name without a mask function would silently get no mask, so it comes first.
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from layerzero.integrations._transformers.attention import attend
    from layerzero.integrations._transformers.masks import mask

    AttentionMaskInterface.register(NAME, mask)
    AttentionInterface.register(NAME, attend)
