"""LayerZero's attention in models of diffusers.

    import layerzero.integrations.diffusers

    pipe.transformer.set_attention_backend("layerzero")

Importing this module registers the backend, as :func:`layerzero.register_with_diffusers` does. Models whose processors do
not ask for a backend (UNets, Stable Diffusion 3) get a processor:

    pipe.unet.set_attn_processor(LayerZeroAttnProcessor())
"""

from layerzero.integrations._diffusers.backend import NAME, register_with_diffusers, unregister_from_diffusers

register_with_diffusers()

# Its classes derive from those of diffusers, which are known to be new enough now.
from layerzero.integrations._diffusers.processors import LayerZeroAttnProcessor, LayerZeroJointAttnProcessor

__all__ = [
    "NAME",
    "LayerZeroAttnProcessor",
    "LayerZeroJointAttnProcessor",
    "register_with_diffusers",
    "unregister_from_diffusers",
]
