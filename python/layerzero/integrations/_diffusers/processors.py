"""Attention processors for the modules of diffusers that compute attention in their processor, without a backend.

Each does what the class it derives from does, with `lz.attention` in the place of torch's function. What that class
would compute in another way is refused: an argument that a processor does not name is dropped by diffusers.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0, JointAttnProcessor2_0

from layerzero.errors import InvalidCallError
from layerzero.integrations._diffusers.attention import attend
from layerzero.integrations.refusals import unsupported

__all__ = ["LayerZeroAttnProcessor", "LayerZeroJointAttnProcessor", "not_joint", "not_plain"]


class LayerZeroAttnProcessor(AttnProcessor2_0):  # type: ignore[misc]
    """Self- and cross-attention, in the place of ``AttnProcessor2_0``: UNets, autoencoders, DiT, PixArt.

        pipe.unet.set_attn_processor(LayerZeroAttnProcessor())

    Raises:
        InvalidCallError: (in a call) the module, or an argument, is one of another processor.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
        rotary_emb: Any = None,
        query_rotary_emb: Any = None,
        key_rotary_emb: Any = None,
        ip_adapter_masks: Any = None,
        ip_hidden_states: Any = None,
    ) -> torch.Tensor:
        """What ``AttnProcessor2_0`` gives. The arguments after ``temb`` are those of other processors: refused."""
        if (why := not_plain(attn)) is not None:
            raise _refused(attn, why)
        _nothing(
            attn,
            image_rotary_emb=image_rotary_emb,
            rotary_emb=rotary_emb,
            query_rotary_emb=query_rotary_emb,
            key_rotary_emb=key_rotary_emb,
            ip_adapter_masks=ip_adapter_masks,
            ip_hidden_states=ip_hidden_states,
        )
        if isinstance(encoder_hidden_states, tuple):
            raise _refused(attn, "the embeddings of an IP-Adapter")
        if encoder_hidden_states is not None and not attn.is_cross_attention and attn.fused_projections:
            raise _refused(attn, "encoder_hidden_states for fused projections of one sequence")
        residual = hidden_states
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        image = hidden_states.shape if hidden_states.dim() == 4 else None
        if image is not None:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        batch = hidden_states.shape[0]
        keys = hidden_states.shape[1] if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        if attention_mask is not None:
            attention_mask = attn.prepare_attention_mask(attention_mask, keys, batch)
            attention_mask = attention_mask.view(batch, attn.heads, -1, attention_mask.shape[-1])
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        if encoder_hidden_states is not None and attn.norm_cross:
            encoder_hidden_states = attn.norm_encoder_hidden_states(encoder_hidden_states)
        query, key, value = (
            _heads(attn, projected) for projected in _projected(attn, hidden_states, encoder_hidden_states)
        )
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        if attn.norm_k is not None:
            key = attn.norm_k(key)
        out = attend(query, key, value, attention_mask, scale=attn.scale).flatten(2).to(query.dtype)
        out = attn.to_out[1](attn.to_out[0](out))
        if image is not None:
            out = out.transpose(1, 2).reshape(image)
        if attn.residual_connection:
            out = out + residual
        result: torch.Tensor = out / attn.rescale_output_factor
        return result


class LayerZeroJointAttnProcessor(JointAttnProcessor2_0):  # type: ignore[misc]
    """Attention over an image and a text together, in the place of ``JointAttnProcessor2_0``: Stable Diffusion 3.

        pipe.transformer.set_attn_processor(LayerZeroJointAttnProcessor())

    Raises:
        InvalidCallError: (in a call) the module, or an argument, is one of another processor.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
        ip_hidden_states: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """What ``JointAttnProcessor2_0`` gives. A mask, which that class ignores, is refused."""
        if (why := not_joint(attn)) is not None:
            raise _refused(attn, why)
        _nothing(
            attn,
            attention_mask=attention_mask,
            image_rotary_emb=image_rotary_emb,
            ip_hidden_states=ip_hidden_states,
        )
        query, key, value = (_heads(attn, project(hidden_states)) for project in (attn.to_q, attn.to_k, attn.to_v))
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        if attn.norm_k is not None:
            key = attn.norm_k(key)
        if encoder_hidden_states is not None:
            text_query, text_key, text_value = (
                _heads(attn, project(encoder_hidden_states))
                for project in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            )
            if attn.norm_added_q is not None:
                text_query = attn.norm_added_q(text_query)
            if attn.norm_added_k is not None:
                text_key = attn.norm_added_k(text_key)
            query = torch.cat((query, text_query), dim=1)
            key = torch.cat((key, text_key), dim=1)
            value = torch.cat((value, text_value), dim=1)
        out = attend(query, key, value).flatten(2).to(query.dtype)
        text = out[:, hidden_states.shape[1] :]
        image: torch.Tensor = attn.to_out[1](attn.to_out[0](out[:, : hidden_states.shape[1]]))
        if encoder_hidden_states is None:
            return image
        return image, text if attn.context_pre_only else attn.to_add_out(text)


def _heads(attn: Any, states: torch.Tensor) -> torch.Tensor:
    """(batch, sequence, heads, head_dim) of (batch, sequence, heads · head_dim)."""
    return states.reshape(*states.shape[:2], attn.heads, -1)


def _projected(attn: Any, hidden: torch.Tensor, encoder: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Query, key and value; by one product where ``fuse_qkv_projections`` has made its weight."""
    if not attn.fused_projections:
        source = hidden if encoder is None else encoder
        return attn.to_q(hidden), attn.to_k(source), attn.to_v(source)
    if encoder is None:
        return attn.to_qkv(hidden).chunk(3, dim=-1)  # type: ignore[no-any-return]
    return attn.to_q(hidden), *attn.to_kv(encoder).chunk(2, dim=-1)


def not_plain(attn: Any) -> str | None:
    """Why a module is not one that ``AttnProcessor2_0`` is for; None where it is."""
    if not isinstance(attn, Attention):
        return "another class than diffusers' Attention"
    if getattr(attn, "add_k_proj", None) is not None:
        return "added key and value projections"
    if attn.inner_kv_dim != attn.inner_dim:
        return "fewer key/value heads, which AttnProcessor2_0 does not know"
    if getattr(attn, "is_causal", False):
        return "causal attention, which AttnProcessor2_0 does not know"
    return None


def not_joint(attn: Any) -> str | None:
    """Why a module is not one that ``JointAttnProcessor2_0`` is for; None where it is."""
    if not isinstance(attn, Attention):
        return "another class than diffusers' Attention"
    if attn.fused_projections:
        return "fused projections: diffusers' processor for them leaves out the norms of queries and keys"
    return None


def _nothing(attn: Any, **given: Any) -> None:
    for name, argument in given.items():
        if argument is not None:
            raise _refused(attn, f"the argument {name}")


def _refused(attn: Any, what: str) -> InvalidCallError:
    hint = "lz.optimize(model) keeps such modules as they are; or give this module the processor it had"
    return unsupported(f"{type(attn).__name__}: LayerZero's processor", what, hint)
