"""A Llama of transformers as it is and with LayerZero, of the same weights, and the steps it makes."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import layerzero as lz
import torch

Step = Callable[[], Any]

NAME = "layerzero"


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for attention: heads first in, sequence first out."""
    if attention_mask is not None:
        out = lz.attention(query, key, value, False, scaling, attn_mask=attention_mask, layout="BHSD")
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        out = lz.attention(query, key, value, causal, scaling, layout="BHSD")
    return out.transpose(1, 2), None


def _norm(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return lz.rms_norm(hidden_states, module.weight, module.variance_epsilon)


def _mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.down_proj(lz.silu_mul(module.gate_proj(x), module.up_proj(x)))


def register() -> None:
    """Makes LayerZero known to transformers. A name without a mask function would silently get no mask."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def build(device: str, tiny: bool) -> Any:
    """The model, as transformers makes it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "num_hidden_layers": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    }
    if tiny:
        sizes |= {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"vocab_size": 1024, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, attn_implementation="sdpa")
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    # Weights of one are no test of a norm.
    for name, parameter in model.named_parameters():
        if "norm" in name:
            with torch.no_grad():
                parameter.uniform_(0.5, 1.5)
    return model.eval().requires_grad_(False)


def shared(model: Any, implementation: str) -> Any:
    """The same model, of the same weights, with another attention."""
    other = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    other.set_attn_implementation(implementation)
    return other


def with_layerzero(model: Any) -> Any:
    """The same model with LayerZero's attention, norms and activation."""
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    register()
    ours = shared(model, NAME)
    for module in ours.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = types.MethodType(_norm, module)
        elif isinstance(module, LlamaMLP):
            module.forward = types.MethodType(_mlp, module)
    return ours


def prefill(model: Any, tokens: torch.Tensor) -> Step:
    """A step over a whole prompt, giving the logits of its last position."""
    return lambda: model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits


def decode(model: Any, filler: Any, tokens: torch.Tensor) -> Step:
    """A step of one token per sequence after a context, which is the same at every step."""
    from transformers import DynamicCache

    cache = DynamicCache(config=filler.config)
    filler(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    held = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    token = tokens[:, :1].clone()

    def step() -> Any:
        for layer, (keys, values) in zip(cache.layers, held, strict=True):
            layer.keys, layer.values = keys, values
        return model(input_ids=token, past_key_values=cache, use_cache=True).logits

    return step
