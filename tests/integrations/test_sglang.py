"""The SGLang plugin: against SGLang's own classes and its torch backend where it is installed, against `fake_sglang` elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_sglang
import layerzero as lz
import pytest
import torch
from layerzero.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
HEADS, KV_HEADS, WIDTH, PLACES = 4, 2, 16, 256
REAL = importlib.util.find_spec("sglang") is not None
if REAL:
    with warnings.catch_warnings():
        # SGLang warns of what it does not have on a CPU.
        warnings.simplefilter("ignore")
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
        from sglang.srt.layers.radix_attention import AttentionType
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.model_executor.forward_batch_info import ForwardMode


@pytest.fixture(params=["fake", "real"])
def sglang(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """The plugin, and where SGLang's pool and modes come from."""
    if request.param == "real":
        if not REAL:
            pytest.skip("SGLang is not installed")

        def pool(page: int) -> Any:
            return MHATokenToKVPool(PLACES, page, torch.float32, KV_HEADS, WIDTH, 1, "cpu", False)

        plugin = importlib.import_module("layerzero.integrations.sglang")
        yield SimpleNamespace(plugin=plugin, pool=pool, modes=ForwardMode, real=True)
        return
    with fake_sglang.installed():
        plugin = importlib.import_module("layerzero.integrations.sglang")

        def made(page: int) -> Any:
            return fake_sglang.MHATokenToKVPool(PLACES, page, torch.float32, KV_HEADS, WIDTH, 1)

        yield SimpleNamespace(plugin=plugin, pool=made, modes=fake_sglang.ForwardMode, real=False)


def _layer(**changed: Any) -> SimpleNamespace:
    """An attention layer of SGLang's: one of a Llama, unless something is changed."""
    plain = {"tp_q_head_num": HEADS, "tp_k_head_num": KV_HEADS, "tp_v_head_num": KV_HEADS, "qk_head_dim": WIDTH}
    plain |= {"v_head_dim": WIDTH, "head_dim": WIDTH, "scaling": 0.3, "layer_id": 0, "logit_cap": 0.0}
    more = {"sliding_window_size": -1, "is_cross_attention": False, "attn_type": "decoder", "k_scale": None}
    return SimpleNamespace(**{**plain, **more, "v_scale": None, **changed})


class Requests:
    """Requests in SGLang's pool, with random keys and values."""

    def __init__(self, pool: Any, page: int, lengths: list[int], new: list[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.new = lengths, new
        self.keys = [torch.randn(n, KV_HEADS, WIDTH, generator=generator) for n in lengths]
        self.values = [torch.randn(n, KV_HEADS, WIDTH, generator=generator) for n in lengths]
        self.query = torch.randn(sum(new), HEADS * WIDTH, generator=generator)
        pages = (torch.randperm(PLACES // page - 1, generator=generator) + 1).tolist()
        self.table = torch.zeros(8, 128, dtype=torch.int32)
        self.rows = torch.randperm(7, generator=generator)[: len(lengths)] + 1
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            places = torch.cat([torch.arange(page) + pages.pop() * page for _ in range(-(-length // page))])
            self.table[row, :length] = places[:length]
        self.pool = pool
        for row, k, v, count in zip(self.rows.tolist(), self.keys, self.values, new, strict=True):
            earlier = self.table[row, : len(k) - count].long()
            pool.get_key_buffer(0)[earlier], pool.get_value_buffer(0)[earlier] = (
                k[: len(k) - count],
                v[: len(k) - count],
            )

    def batch(self, mode: Any) -> SimpleNamespace:
        fresh = [
            self.table[row, n - new : n] for row, n, new in zip(self.rows.tolist(), self.lengths, self.new, strict=True)
        ]
        lengths, new = torch.tensor(self.lengths), torch.tensor(self.new)
        places = {"req_pool_indices": self.rows, "out_cache_loc": torch.cat(fresh).long(), "encoder_lens": None}
        extend = {"extend_seq_lens": new, "extend_prefix_lens": lengths - new}
        sizes = {"batch_size": len(self.lengths), "seq_lens": lengths, "seq_lens_cpu": lengths.clone()}
        return SimpleNamespace(forward_mode=mode, **sizes, **places, **extend)

    def fresh(self) -> tuple[torch.Tensor, torch.Tensor]:
        each = [
            torch.cat([x[len(x) - new :] for x, new in zip(xs, self.new, strict=True)])
            for xs in (self.keys, self.values)
        ]
        return each[0], each[1]

    def right(self, window: int, softcap: float) -> torch.Tensor:
        """Attention by its definition in float64. A window is the number of earlier keys, as SGLang counts."""
        results, first = [], 0
        for k, v, length, new in zip(self.keys, self.values, self.lengths, self.new, strict=True):
            for at in range(new):
                position = length - new + at
                low = 0 if window < 0 else max(0, position - window)
                for head in range(HEADS):
                    group = head // (HEADS // KV_HEADS)
                    query = self.query[first + at].view(HEADS, WIDTH)[head].double()
                    scores = k[low : position + 1, group].double() @ query * 0.3
                    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                    results.append(scores.softmax(0) @ v[low : position + 1, group].double())
            first += new
        return torch.stack(results).view(first, HEADS * WIDTH)


BATCHES = {
    "DECODE": ([5, 33, 64, 1], [1, 1, 1, 1]),
    "EXTEND": ([5, 40, 64], [5, 17, 64]),
    "MIXED": ([20, 33, 64], [20, 1, 1]),
}


def _backend(sglang: SimpleNamespace, asked: Requests, page: int) -> Any:
    sglang.plugin.register()
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    return registry.ATTENTION_BACKENDS["layerzero"](fake_sglang.runner(asked.pool, asked.table, page))


@pytest.mark.parametrize(("window", "softcap"), [(-1, 0.0), (9, 0.0), (-1, 2.0)])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("mode", BATCHES)
def test_a_step_is_attention_by_its_definition(
    mode: str, page: int, window: int, softcap: float, sglang: SimpleNamespace
) -> None:
    asked = Requests(sglang.pool(page), page, *BATCHES[mode])
    backend, layer = _backend(sglang, asked, page), _layer(sliding_window_size=window, logit_cap=softcap)
    batch = asked.batch(sglang.modes[mode])
    backend.init_forward_metadata(batch)
    run = backend.forward_decode if mode == "DECODE" else backend.forward_extend
    output = run(asked.query, *asked.fresh(), layer, batch)
    torch.testing.assert_close(output.double(), asked.right(window, softcap), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page", [1, 16])
def test_a_captured_step_follows_sglangs_tensors(page: int, sglang: SimpleNamespace) -> None:
    """A replay repeats what ran inside the capture: on the tensors of the capture, which hold another batch by then."""
    captured = Requests(sglang.pool(page), page, *BATCHES["DECODE"])
    backend, layer = _backend(sglang, captured, page), _layer()
    static = captured.batch(sglang.modes.DECODE)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    backend.init_cuda_graph_state(8, 8)
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    held = backend.forward_metadata

    def inside(query: torch.Tensor, fresh: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        backend.init_forward_metadata_in_graph(static)
        return backend.forward_decode(query, *fresh, layer, static)

    output = inside(captured.query, captured.fresh())
    torch.testing.assert_close(output.double(), captured.right(-1, 0.0), rtol=1e-5, atol=1e-5)

    # Two requests, and two rows that fill up the batch: length 1, request 0, place 0.
    later = Requests(captured.pool, page, [77, 18], [1, 1], seed=1)
    captured.table.copy_(later.table)
    new = later.batch(sglang.modes.DECODE)
    for name, filled in (("req_pool_indices", 0), ("seq_lens", 1), ("out_cache_loc", 0)):
        held_by_graph = getattr(static, name)
        held_by_graph.fill_(filled)
        held_by_graph[:2] = getattr(new, name)
    addresses = (held.tables.data_ptr(), held.lengths.data_ptr())
    query = torch.cat((later.query, torch.ones(2, HEADS * WIDTH)))
    fresh = tuple(torch.cat((x, torch.ones(2, KV_HEADS, WIDTH))) for x in later.fresh())
    output = inside(query, fresh)
    torch.testing.assert_close(output[:2].double(), later.right(-1, 0.0), rtol=1e-5, atol=1e-5)
    assert backend.forward_metadata is held and addresses == (held.tables.data_ptr(), held.lengths.data_ptr())
    # A step that is not captured makes tensors of its own.
    backend.init_forward_metadata(new)
    assert not backend.forward_metadata.graph and backend.forward_metadata.tables.data_ptr() != addresses[0]


def test_a_step_that_sglang_captures_is_made_ready_once(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = importlib.import_module("layerzero.integrations.captures")
    entered: list[Any] = []
    capturing = [False]
    monkeypatch.setattr(captures.lz, "capture", lambda stream: entered.append(stream) or nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "a stream")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    ready: set[tuple[Any, ...]] = set()
    for kind in ((1,), (1,), (2,)):
        with captures.prepared(kind, ready):
            pass
    assert entered == ["a stream"] * 2 and ready == {(1,), (2,)}
    capturing[0] = True
    with captures.prepared((3,), ready):
        pass
    assert len(entered) == 2 and (3,) not in ready, "nothing is prepared inside a capture"


@pytest.mark.skipif(not REAL, reason="SGLang is not installed")
@pytest.mark.parametrize("window", [-1, 9])
@pytest.mark.parametrize("mode", BATCHES)
def test_a_step_is_that_of_sglangs_torch_backend(mode: str, window: int) -> None:
    plugin = importlib.import_module("layerzero.integrations.sglang")
    outputs = []
    for own in (True, False):
        pool = MHATokenToKVPool(PLACES, 16, torch.float32, KV_HEADS, WIDTH, 1, "cpu", False)
        asked = Requests(pool, 16, *BATCHES[mode])
        runner = fake_sglang.runner(pool, asked.table, 16)
        backend = TorchNativeAttnBackend(runner) if own else _backend(SimpleNamespace(plugin=plugin), asked, 16)
        batch = asked.batch(ForwardMode[mode])
        backend.init_forward_metadata(batch)
        run = backend.forward_decode if mode == "DECODE" else backend.forward_extend
        layer = _layer(sliding_window_size=window, attn_type=AttentionType.DECODER)
        outputs.append(run(asked.query, *asked.fresh(), layer, batch))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)


def test_the_backend_is_registered_once(sglang: SimpleNamespace) -> None:
    sglang.plugin.register()
    sglang.plugin.register()
    arguments = importlib.import_module("sglang.srt.server_args")
    assert arguments.ATTENTION_BACKEND_CHOICES.count("layerzero") == 1


@pytest.mark.parametrize(
    ("changed", "others", "said"),
    [
        ({"is_cross_attention": True}, {}, "not a decoder's"),
        ({"attn_type": "encoder_only"}, {}, "not a decoder's"),
        ({"v_head_dim": 8}, {}, "keys of 16 and values of 8"),
        ({}, {"sinks": torch.zeros(HEADS)}, "does not serve sinks(.|\\n)*use another --attention-backend"),
    ],
)
def test_what_is_not_served_is_refused(
    changed: dict[str, Any], others: dict[str, Any], said: str, sglang: SimpleNamespace
) -> None:
    asked = Requests(sglang.pool(16), 16, *BATCHES["DECODE"])
    backend, batch = _backend(sglang, asked, 16), asked.batch(sglang.modes.DECODE)
    backend.init_forward_metadata(batch)
    with pytest.raises(lz.InvalidCallError, match=said):
        backend.forward_decode(asked.query, *asked.fresh(), _layer(**changed), batch, **others)


def test_steps_and_models_of_another_kind_are_refused(sglang: SimpleNamespace) -> None:
    asked = Requests(sglang.pool(16), 16, *BATCHES["DECODE"])
    backend = _backend(sglang, asked, 16)
    with pytest.raises(lz.InvalidCallError, match="steps of the kind TARGET_VERIFY"):
        backend.init_forward_metadata(asked.batch(sglang.modes.TARGET_VERIFY))
    with pytest.raises(RuntimeError, match="init_cuda_graph_state(.|\\n)*was not called"):
        backend.init_forward_metadata_out_graph(asked.batch(sglang.modes.DECODE), in_capture=True)
    with pytest.raises(lz.InvalidCallError, match="24 tokens for 8 requests(.|\\n)*--disable-cuda-graph"):
        backend.init_cuda_graph_state(8, 24)
    with pytest.raises(lz.InvalidCallError, match="CUDA graphs of the kind EXTEND"):
        backend.init_forward_metadata_out_graph(asked.batch(sglang.modes.EXTEND), in_capture=True)
    with pytest.raises(RuntimeError, match="was not called"):
        backend.forward_decode(asked.query, *asked.fresh(), _layer(), asked.batch(sglang.modes.DECODE))
    with pytest.raises(lz.InvalidCallError, match=r"a cache of torch\.float32 for queries of torch\.float16"):
        backend.forward_decode(asked.query.half(), *asked.fresh(), _layer(), asked.batch(sglang.modes.DECODE))
    runner = fake_sglang.runner(asked.pool, asked.table, 16)
    runner.use_mla_backend = True
    with pytest.raises(lz.InvalidCallError, match="does not serve MLA"):
        type(backend)(runner)


def test_nothing_of_sglang_is_imported_by_the_package() -> None:
    code = "import sys, layerzero, layerzero.integrations.sglang; print([m for m in sys.modules if m.split('.')[0] == 'sglang'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_names_the_plugin() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    module, _, function = points["sglang.srt.plugins"]["layerzero"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_without_sglang_it_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    plugin: Any = importlib.import_module("layerzero.integrations.sglang")
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="SGLang is not installed"):
        plugin.register()
    plugin.plugin()
    assert "SGLang is not installed" in caplog.text
