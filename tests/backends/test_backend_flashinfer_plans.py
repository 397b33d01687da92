"""FlashInfer's plans: which calls share one, and what makes another one."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import layerzero as lz
import pytest
import torch
from attention_calls import Paged
from fake_flashinfer import FlashInfer, install
from flashinfer_installed import (
    CORES,
    PREFILL,
    both_registered,
    kernel,
)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As if it were installed."""
    with both_registered():
        yield


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FlashInfer:
    """The library in place, and found."""
    return install(monkeypatch, FlashInfer())


# --- plans ------------------------------------------------------------------------------------------------------------


class Planning:
    """One kind of call, again and again."""

    def __init__(self, fake: FlashInfer, name: str, call: Paged) -> None:
        self.fake, self.function, self.call = fake, kernel(name), call
        self.tensors = call.tensors()

    def run(self, **change: Any) -> int:
        """Runs the call, holds it to the contract, and tells how many plans it took."""
        before = len(self.fake.plans)
        call = replace(self.call, **change)
        call.check(self.function(**call.arguments(self.function, self.tensors)), call.expected(self.tensors))
        return len(self.fake.plans) - before


def test_layers_of_a_model_share_a_plan(fake: FlashInfer) -> None:
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    assert planning.run() == 1
    for _ in range(3):
        # Another layer: other queries and caches, the same tables and lengths.
        fresh = planning.call.tensors()
        planning.tensors |= {name: fresh[name] for name in ("query", "key_cache", "value_cache")}
        assert planning.run() == 0
    assert len(fake.made) == 1 and len(fake.runs) == 4


def test_a_write_to_what_was_planned_from_is_noticed(fake: FlashInfer) -> None:
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    planning.run()
    tensors = planning.tensors
    writes: list[Any] = [
        lambda: tensors["context_lens"].copy_(torch.tensor([41, 50])),
        lambda: tensors["context_lens"].add_(1),
        lambda: tensors["context_lens"].__setitem__(0, 7),
        lambda: tensors["context_lens"][1:].fill_(33),
        lambda: tensors["block_tables"][0].copy_(tensors["block_tables"][0].flip(0).clamp(max=3)),
        lambda: torch.add(tensors["context_lens"], 0, out=tensors["context_lens"]),
    ]
    for write in writes:
        write()
        lengths = tuple(tensors["context_lens"].tolist())
        assert planning.run(lengths=lengths) == 1, "the plan of other lengths was used"
        assert planning.run(lengths=lengths) == 0
    # Inference mode counts writes to tensors that were made outside it.
    with torch.inference_mode():
        tensors["context_lens"].copy_(torch.tensor([3, 9]))
        assert planning.run(lengths=(3, 9)) == 1
    # Another memory behind the same tensor.
    tensors["context_lens"].data = torch.tensor([12, 20], dtype=torch.int32)
    assert planning.run(lengths=(12, 20)) == 1


def test_tensors_made_in_inference_mode_are_read_every_time(fake: FlashInfer) -> None:
    with torch.inference_mode():
        planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
        assert [planning.run(), planning.run()] == [1, 1]
        planning.tensors["context_lens"].add_(-3)
        assert planning.run(lengths=(37, 47)) == 1
    assert len(fake.made) == 1


def test_another_tensor_is_another_plan_wherever_it_lies(fake: FlashInfer) -> None:
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    assert planning.run() == 1
    for lengths in ((40, 50), (8, 16), (17, 50), (40, 50)):
        del planning.tensors["context_lens"]
        gc.collect()
        # Often where the one before it was, with the same version.
        planning.tensors["context_lens"] = torch.tensor(lengths, dtype=torch.int32)
        assert planning.run(lengths=lengths) == 1


def test_what_decides_a_plan_besides_tensors_is_part_of_it(fake: FlashInfer) -> None:
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    changes: list[dict[str, Any]] = [{}, {"scale": 0.5}, {"window_left": 7}, {"softcap": 3.0}, {"scale": 0.25}]
    assert [planning.run(**change) for change in changes] == [1] * 5
    assert [planning.run(**change) for change in changes] == [0] * 5
    assert len(fake.made) == 5 and len({id(w.workspace) for w in fake.made}) == 1, "one workspace"
    packed = Planning(fake, PREFILL, Paged(prefill=True, lengths=(40, 50), rows=(3, 4), block_size=16))
    assert [packed.run(), packed.run(), packed.run(causal=False), packed.run()] == [1, 0, 1, 0]
    packed.tensors["cu_seqlens_q"].copy_(torch.tensor([0, 6, 7]))
    assert packed.run(rows=(6, 1)) == 1


def test_streams_and_threads_have_plans_of_their_own(fake: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = importlib.import_module("layerzero.backends._shared.flashinfer.plans")
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    assert [planning.run(), planning.run()] == [1, 0]
    monkeypatch.setattr(plans, "stream_of", lambda device: 77)
    assert [planning.run(), planning.run()] == [1, 0]
    assert len({id(w.workspace) for w in fake.made}) == 2
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend((planning.run(), planning.run())))
    thread.start()
    thread.join()
    assert seen == [1, 0] and len(fake.made) == 3


def test_no_more_wrappers_are_kept_than_that(fake: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = importlib.import_module("layerzero.backends._shared.flashinfer.plans")
    monkeypatch.setattr(plans, "MOST", 3)
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    scales = (0.1, 0.2, 0.3)
    assert [planning.run(scale=scale) for scale in scales] == [1, 1, 1]
    assert planning.run(scale=0.1) == 0
    assert planning.run(scale=0.4) == 1
    # The one that was used longest ago was evicted.
    assert [planning.run(scale=0.1), planning.run(scale=0.3), planning.run(scale=0.2)] == [0, 0, 1]


def test_nothing_is_planned_while_a_graph_is_captured(fake: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = importlib.import_module("layerzero.backends._shared.flashinfer.plans")
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    planning.run()
    monkeypatch.setattr(plans, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="which a CUDA graph cannot capture"):
        planning.run()
    assert len(fake.runs) == 1


def test_a_plan_that_failed_is_not_used(fake: FlashInfer) -> None:
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    planning.run()
    good = planning.tensors["context_lens"].clone()
    planning.tensors["context_lens"].fill_(1000)
    for _ in range(2):
        with pytest.raises(lz.InvalidCallError, match=r"context_lens\[0\] is 1000, expected 0 to 64"):
            planning.run()
    planning.tensors["context_lens"].copy_(good)
    assert planning.run() == 1
    planning.tensors["block_tables"][1, 2] = 99
    with pytest.raises(lz.InvalidCallError, match=r"block_tables\[1, 2\] is 99, expected an index from 0 to below"):
        planning.run()


def test_caches_that_differ_in_strides_are_refused(fake: FlashInfer) -> None:
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    cache = planning.tensors["value_cache"]
    planning.tensors["value_cache"] = cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(RuntimeError, match="by the same strides"):
        planning.run()
