"""A transformer whose operations are LayerZero's: trained for a few steps, then compiled into one graph.

    python examples/transformer_block.py [--backend inductor]

The model learns to continue sequences that repeat, which only attention to earlier positions can do.
"""

from __future__ import annotations

import argparse

import layerzero as lz
import torch
from torch import Tensor, nn


class TransformerBlock(nn.Module):
    """Pre-norm attention with grouped key/value heads and rotary positions, then a gated feed-forward layer."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate = nn.Parameter(torch.randn(2 * hidden_size, hidden_size) * hidden_size**-0.5)
        self.up = nn.Parameter(torch.randn(2 * hidden_size, hidden_size) * hidden_size**-0.5)
        self.down = nn.Parameter(torch.randn(hidden_size, 2 * hidden_size) * (2 * hidden_size) ** -0.5)
        self.attention_norm = nn.Parameter(torch.ones(hidden_size))
        self.mlp_norm = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` is (batch, sequence, hidden_size)."""
        batch, seq, _ = x.shape
        normed = lz.rms_norm(x, self.attention_norm)
        q = self.q_proj(normed).view(batch, seq, self.num_heads, self.head_dim)
        k = self.k_proj(normed).view(batch, seq, self.num_kv_heads, self.head_dim)
        v = self.v_proj(normed).view(batch, seq, self.num_kv_heads, self.head_dim)
        # BSHD is the default; a model that says it does not depend on the setting.
        q, k = lz.rope(q, cos, sin, layout="BSHD"), lz.rope(k, cos, sin, layout="BSHD")
        attended = lz.attention(q, k, v, causal=True, layout="BSHD")
        x = x + self.o_proj(attended.reshape(batch, seq, -1))
        normed = lz.rms_norm(x, self.mlp_norm)
        return x + lz.fused_mlp(normed, self.up, self.down, self.gate)


class LanguageModel(nn.Module):
    """A stack of blocks between an embedding and its transpose."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, vocab: int, hidden_size: int = 64, num_heads: int = 4, layers: int = 2, longest: int = 64
    ) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(vocab, hidden_size) * 0.02)
        self.blocks = nn.ModuleList(TransformerBlock(hidden_size, num_heads, num_heads // 2) for _ in range(layers))
        self.final_norm = nn.Parameter(torch.ones(hidden_size))
        half = hidden_size // num_heads // 2
        angles = torch.outer(torch.arange(longest), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of what follows each position."""
        seq = ids.shape[1]
        x = lz.embedding(ids, self.embedding)
        for block in self.blocks:
            x = block(x, self.cos[:seq], self.sin[:seq])
        return lz.linear(lz.rms_norm(x, self.final_norm), self.embedding)


def sequences(count: int, vocab: int, length: int) -> Tensor:
    """Random patterns of 2 to 5 tokens, each repeated over the whole length."""
    rows = [torch.randint(vocab, (int(torch.randint(2, 6, ())),)).repeat(length)[:length] for _ in range(count)]
    return torch.stack(rows)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """How surprising each next token is, once the pattern has been seen."""
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits[:, 5:].flatten(0, 1), ids[:, 6:].flatten())


def main() -> None:
    """Trains, compiles, compares."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="inductor", help="torch.compile's backend")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    torch.manual_seed(0)
    vocab, length = 32, 33
    model = LanguageModel(vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps + 1):
        loss = loss_of(model, sequences(32, vocab, length))
        if step % (options.steps // 4 or 1) == 0:
            print(f"step {step:>3}: loss {loss.item():.3f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    q = torch.randn(32, length - 1, 4, 16, requires_grad=True)
    kv = torch.randn(32, length - 1, 2, 16)
    chosen = lz.which("attention", q, kv, kv, layout="BSHD")
    print(f"attention in training is {chosen.op} by {chosen.kernel_id}")

    compiled = torch.compile(model, fullgraph=True, backend=options.backend)
    ids = sequences(4, vocab, length)
    with torch.no_grad():
        difference = (compiled(ids) - model(ids)).abs().max().item()
    print(f"compiled into one graph by {options.backend}: differs by {difference:.1g}")


if __name__ == "__main__":
    main()
