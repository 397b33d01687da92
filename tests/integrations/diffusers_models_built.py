"""Models of diffusers with seeded random weights, small enough for a test, by name: each with what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch


def _seeded(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _built(kind: Any, **sizes: Any) -> Any:
    """A model whose weights are not those of a new one: some of those are zeros, which hide everything behind them."""
    torch.manual_seed(0)
    model = kind(**sizes).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.12)
            elif "norm" in name.lower() and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
    return model


def unet(**more: Any) -> Any:
    """Stable Diffusion's: self-attention, and cross-attention to a text."""
    sizes: dict[str, Any] = {
        "sample_size": 8,
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 24,
        "attention_head_dim": 4,
        "norm_num_groups": 8,
    }
    return _built(diffusers.UNet2DConditionModel, **{**sizes, **more})


def unet_inputs() -> dict[str, Any]:
    """A picture, a time and a text."""
    return {
        "sample": _seeded(2, 4, 8, 8),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": _seeded(2, 5, 24, seed=2),
    }


def _unet() -> tuple[Any, dict[str, Any]]:
    return unet(), unet_inputs()


def _unet_masked() -> tuple[Any, dict[str, Any]]:
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 2:] = False
    return unet(), {**unet_inputs(), "encoder_attention_mask": mask}


def _dit() -> tuple[Any, dict[str, Any]]:
    model = _built(
        diffusers.DiTTransformer2DModel,
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=8,
    )
    given = {
        "hidden_states": _seeded(2, 4, 8, 8),
        "timestep": torch.tensor([3, 7]),
        "class_labels": torch.tensor([1, 9]),
    }
    return model, given


def _pixart() -> tuple[Any, dict[str, Any]]:
    model = _built(
        diffusers.PixArtTransformer2DModel,
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=32,
        caption_channels=24,
        sample_size=8,
        patch_size=2,
        use_additional_conditions=False,
    )
    mask = torch.ones(2, 6)
    mask[0, 4:] = 0
    given = {
        "hidden_states": _seeded(2, 4, 8, 8),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": _seeded(2, 6, 24, seed=2),
        "encoder_attention_mask": mask,
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    return model, given


def _sd3() -> tuple[Any, dict[str, Any]]:
    model = _built(
        diffusers.SD3Transformer2DModel,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    given = {
        "hidden_states": _seeded(2, 4, 8, 8),
        "encoder_hidden_states": _seeded(2, 5, 24, seed=2),
        "pooled_projections": _seeded(2, 16, seed=3),
        "timestep": torch.tensor([3, 7]),
    }
    return model, given


def _flux() -> tuple[Any, dict[str, Any]]:
    model = _built(
        diffusers.FluxTransformer2DModel,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    given = {
        "hidden_states": _seeded(2, 16, 4),
        "encoder_hidden_states": _seeded(2, 5, 24, seed=2),
        "pooled_projections": _seeded(2, 16, seed=3),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
        "txt_ids": torch.zeros(5, 3),
    }
    return model, given


def _wan() -> tuple[Any, dict[str, Any]]:
    model = _built(
        diffusers.WanTransformer3DModel,
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    given = {
        "hidden_states": _seeded(1, 4, 2, 8, 8),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": _seeded(1, 5, 16, seed=2),
    }
    return model, given


#: By name: the model with its inputs, the classes of its attention modules, and whether they ask for a backend.
MODELS: dict[str, tuple[Callable[[], tuple[Any, dict[str, Any]]], set[str], bool]] = {
    "unet": (_unet, {"Attention"}, False),
    "unet_masked": (_unet_masked, {"Attention"}, False),
    "dit": (_dit, {"Attention"}, False),
    "pixart": (_pixart, {"Attention"}, False),
    "sd3": (_sd3, {"Attention"}, False),
    "flux": (_flux, {"FluxAttention"}, True),
    "wan": (_wan, {"WanAttention"}, True),
}
