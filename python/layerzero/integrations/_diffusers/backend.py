"""LayerZero's name among the attention backends of diffusers.

diffusers looks a backend up by a member of its enum ``AttentionBackendName``, and has no call that adds one. So
:func:`register_with_diffusers` adds a member, and the function through the registry's own ``register``.
:func:`unregister_from_diffusers` removes both.
"""

from __future__ import annotations

from typing import Any

from layerzero.integrations.requirements import require

__all__ = ["NAME", "member", "register_with_diffusers", "unregister_from_diffusers"]

#: What the backend is called.
NAME = "layerzero"
#: The name of its member of the enum.
_MEMBER = "LAYERZERO"

#: The first version with attention backends by name.
OLDEST = (0, 35)


def register_with_diffusers() -> None:
    """Makes ``model.set_attention_backend("layerzero")`` known to diffusers. Calling it again changes nothing.

    diffusers' enum ``AttentionBackendName`` gets the member ``LAYERZERO``. Models that do not name the backend are not
    affected.

    Raises:
        ConfigurationError: diffusers is not installed, or older than 0.35.
    """
    _check()
    from diffusers.models import attention_dispatch

    from layerzero.integrations._diffusers.attention import attend

    names = attention_dispatch.AttentionBackendName
    if _MEMBER not in names.__members__:
        added: Any = str.__new__(names, NAME)
        added._name_, added._value_ = _MEMBER, NAME
        names._member_names_.append(_MEMBER)
        names._member_map_[_MEMBER] = added
        names._value2member_map_[NAME] = added
        # An enum refuses to set its own members.
        type.__setattr__(names, _MEMBER, added)
    attention_dispatch._AttentionBackendRegistry.register(member())(attend)


def member() -> Any:
    """LayerZero's member of diffusers' enum."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    return AttentionBackendName(NAME)


def unregister_from_diffusers() -> None:
    """Brings diffusers' registry and enum back as they were. Calling it again changes nothing.

    A model that was set to the backend must be set to another one: ``model.reset_attention_backend()``.
    """
    _check()
    from diffusers.models import attention_dispatch

    names, registry = attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry
    if _MEMBER not in names.__members__:
        return
    ours = member()
    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        table.pop(ours, None)
    if registry._active_backend == ours:
        registry._active_backend = names.NATIVE
    names._member_names_.remove(_MEMBER)
    del names._member_map_[_MEMBER], names._value2member_map_[NAME]
    type.__delattr__(names, _MEMBER)


def _check() -> None:
    require("diffusers", OLDEST, "attention backends by name", code="OLD_DIFFUSERS")
