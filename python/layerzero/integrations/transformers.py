"""LayerZero as an attention implementation of transformers.

    import layerzero.integrations.transformers

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="layerzero")

Importing this module registers it, as :func:`layerzero.register_with_transformers` does.
"""

from layerzero.integrations._transformers.registering import NAME, register_with_transformers

__all__ = ["NAME", "register_with_transformers"]

register_with_transformers()
