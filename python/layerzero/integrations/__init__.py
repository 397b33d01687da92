"""What other libraries see of LayerZero. Nothing here imports them: each is met when the program imports it."""

import os

from layerzero.integrations.import_hook import after_import

__all__ = ["install"]


def install() -> None:
    """Registers LayerZero's operators with torch, and their tracing with its compiler, once the program imports them.

    Where they are imported already, that is now. Calling it again changes nothing.
    """
    after_import("torch", _meet_torch)
    after_import("torch._dynamo", _meet_compiler)
    if os.environ.get("LAYERZERO_TRANSFORMERS", "").strip().lower() in ("1", "true", "yes", "on"):
        # Attention functions are looked up there; whoever builds a model imports it.
        after_import("transformers.modeling_utils", _meet_transformers)


def _meet_torch() -> None:
    # It registers itself when it is imported; where it is what imports torch, when it is done.
    from layerzero.integrations.torch_operators import torch_ops  # noqa: F401


def _meet_compiler() -> None:
    from layerzero import control, deciding
    from layerzero.integrations.torch_operators import torch_ops

    control.look_at_layouts()
    torch_ops.register_tracing()
    deciding.stay_out_of_graphs()


def _meet_transformers() -> None:
    from layerzero.integrations._transformers.registering import register_with_transformers

    register_with_transformers()
