"""Every operation in a CUDA graph: captured, replayed on other numbers, and held to its definition in float64."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import pytest
import torch
import torch_references
from bench_rows import SMALL, Recording, is_right, may_be_drawn, reconstructs, tensors, wide
from layerzero.bench.capturing import captured
from layerzero.bench.model_rows import rows
from layerzero.bench.row import Maker, Row
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
#: Of bfloat16, absolute and relative.
TOLERANCE = 1e-2
REPLAYS = 20


class Changing(Maker):
    """Makes tensors whose numbers can be drawn anew, where they lie."""

    def __init__(self, name: str, device: str, dtype: torch.dtype) -> None:
        super().__init__(name, device, dtype)
        self._drawn: list[tuple[Tensor, float]] = []

    def tensor(self, *shape: int, dtype: Any = None, scale: float = 1.0) -> Tensor:
        made = super().tensor(*shape, dtype=dtype, scale=scale)
        self._drawn.append((made, scale))
        return made

    def change(self) -> None:
        for made, scale in self._drawn:
            made.copy_(torch.randn_like(made, dtype=torch.float32) * scale)


def one_of_each() -> list[Row]:
    """A row of every kind, phase and layout."""
    of = {(row.kind, row.phase, row.layout): row for row in rows(SMALL) if row.elements <= SMALL.largest}
    return list(of.values())


def here(value: Any) -> Any:
    """The same on the CPU and in float64, of tensors."""
    return wide(value.cpu()) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("row", one_of_each(), ids=lambda row: row.name)
def test_a_replay_gives_what_the_operation_is(row: Row) -> None:
    made = Changing(row.name, "cuda", torch.bfloat16)
    pair = row.make(made)
    with torch.no_grad():
        graph, result = captured(lambda: pair.ours(lz))
        made.change()
        for cache in pair.updated:
            cache.zero_()
        name, args, kwargs = pair.ours(Recording())
        args, kwargs = tuple(map(here, args)), {key: here(value) for key, value in kwargs.items()}
        graph.replay()
        torch.cuda.synchronize()
    if name.startswith("sample"):
        allowed = may_be_drawn(name, args[0])
        drawn = []
        for _ in range(REPLAYS):
            graph.replay()
            drawn.append(result.cpu())
            assert allowed.gather(-1, drawn[-1][:, None]).all()
        assert len({tuple(one.tolist()) for one in drawn}) > 1, "every replay drew the same"
    elif name == "quantize":
        reconstructs(*(here(one) for one in result[:2]), args[0])
    elif name == "kv_append":
        is_right([one.cpu() for one in pair.updated], torch_references.kv_append(*args, **kwargs), 0.0)
    else:
        reference = {"embedding": lambda ids, table: table[ids]}.get(name) or getattr(torch_references, name)
        is_right([one.cpu() for one in tensors(result)], tensors(reference(*args, **kwargs)), TOLERANCE)


@pytest.mark.parametrize("name", ["sample_topk", "sample_topp"])
def test_replays_draw_by_the_distribution(name: str) -> None:
    """Frequencies over many rows with one distribution, within five standard deviations."""
    weights = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0], device="cuda")
    logits = weights.log().expand(8192, -1).contiguous()
    # The three largest of five; and those that have 14/16 of the probability.
    graph, result = captured(lambda: getattr(lz, name)(logits, 3 if name == "sample_topk" else 0.87))
    counts = torch.zeros(5, dtype=torch.int64)
    for _ in range(REPLAYS):
        graph.replay()
        counts += torch.bincount(result.cpu(), minlength=5)
    total = int(counts.sum())
    for count, weight in zip(counts.tolist(), (8, 4, 2, 0, 0), strict=True):
        p = weight / 14
        assert abs(count - total * p) <= 5 * (total * p * (1 - p)) ** 0.5, counts
