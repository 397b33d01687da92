"""The models of ``layerzero bench graph``. Weights and inputs are random, from a seed.

`CASES` is the list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerzero.bench import decode_steps


@dataclass(frozen=True)
class Case:
    """A model at one size of its inputs."""

    name: str
    """Its name in tables."""
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
    """Makes the model and its inputs."""
    requires: str = ""
    """The package it needs besides torch."""
    tokens: int = 0
    """Tokens that a call generates."""


class Mlp(nn.Module):
    """Three linear layers, with ReLU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Norm, attention of four heads in torch's own function, residual, norm, MLP with ReLU, residual."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.norm(x)
        q, k, v = (
            layer(normed).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.relu(self.up(self.norm_mlp(x))))  # type: ignore[no-any-return]


class Logits(nn.Module):
    """A causal language model of transformers that returns its logits and keeps no cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def _mlp(batch: int, width: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Mlp(width), (torch.randn(batch, width),)


def _block(batch: int, length: int, width: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Block(width), (torch.randn(batch, length, width),)


def gpt2_model() -> Any:
    """GPT-2 of 124 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa"))


def llama_model() -> Any:
    """A Llama of 54 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def _prompt(model: Callable[[], Any], length: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    made = model()
    return Logits(made), (torch.randint(0, made.config.vocab_size, (1, length)),)


#: All cases, in the order of tables.
CASES: tuple[Case, ...] = (
    *(Case(f"mlp {batch}×{width}", partial(_mlp, batch, width)) for width in (512, 2048) for batch in (1, 32, 128)),
    *(
        Case(f"block {batch}×{length}×{width}", partial(_block, batch, length, width))
        for batch, length, width in ((1, 16, 64), (4, 16, 64), (1, 64, 128), (4, 64, 128), (1, 128, 256), (4, 128, 256))
    ),
    *(Case(f"gpt2 S={length}", partial(_prompt, gpt2_model, length), "transformers") for length in (16, 128, 512)),
    *(Case(f"llama S={length}", partial(_prompt, llama_model, length), "transformers") for length in (16, 128)),
    *(
        Case(f"{name} decode at {context}", partial(step, context), "transformers", tokens=1)
        for name, step in (("gpt2", decode_steps.gpt2), ("llama", decode_steps.llama))
        for context in (128, 512)
    ),
)


def made(case: Case) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model and inputs of a case, the same in every process."""
    torch.manual_seed(20261118)
    model, inputs = case.make()
    return model.eval().requires_grad_(False), inputs
