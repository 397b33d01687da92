"""The vLLM plugin, without vLLM: its registry, batches and caches are those of `fake_vllm`, whose signatures are vLLM's.

test_vllm_engine.py runs it in vLLM itself, where that is installed.
"""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import layerzero as lz
import pytest
import torch
from layerzero import loading
from layerzero.errors import ConfigurationError
from processes import SUPPORT, answer

ROOT = Path(__file__).parents[2]
HEADS, KV_HEADS, WIDTH, PAGE = 4, 2, 16, 16
SNAPSHOTS = sorted((ROOT / "testdata" / "signatures").glob("vllm_backend-*.json"))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    with fake_vllm.installed() as found:
        plugin = importlib.import_module("layerzero.integrations.vllm")
        monkeypatch.setattr(plugin, "_version", lambda: fake_vllm.VERSION)
        found.plugin = plugin
        found.attention = importlib.import_module("layerzero.integrations.vllm.attention")
        yield found


# --- what is registered ---------------------------------------------------------------------------------------------------


def test_nothing_of_vllm_is_imported_by_the_package() -> None:
    code = "import sys, layerzero, layerzero.integrations.vllm; print([m for m in sys.modules if m.split('.')[0] == 'vllm'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_names_the_plugin() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    module, _, function = points["vllm.general_plugins"]["layerzero"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_backend_has_a_name_of_its_own(vllm: SimpleNamespace) -> None:
    vllm.plugin.register()
    vllm.plugin.register()
    path = vllm.registry.LAYERZERO.get_path()
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name) is vllm.attention.LayerZeroBackend
    assert vllm.attention.LayerZeroBackend.get_name() == "LAYERZERO" and not vllm.registry.CUSTOM.is_overridden()


def test_on_a_cpu_the_one_that_was_asked_for_is_found(vllm: SimpleNamespace) -> None:
    vllm.plugin.register()
    module, _, name = vllm.registry.CPU_ATTN.get_path().rpartition(".")

    def found(backend: Any) -> Any:
        fake_vllm.current[0] = SimpleNamespace(attention_config=SimpleNamespace(backend=backend))
        return getattr(importlib.import_module(module), name)

    assert found(vllm.registry.LAYERZERO) is vllm.attention.LayerZeroBackend
    assert found(None) is found(vllm.registry.CPU_ATTN) is fake_vllm.CPUAttentionBackend
    fake_vllm.current[0] = None
    assert getattr(importlib.import_module(module), name) is fake_vllm.CPUAttentionBackend
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = vllm.attention.Other


def test_a_replaced_backend_for_cpus_stays(vllm: SimpleNamespace) -> None:
    fake_vllm.register_backend(vllm.registry.CPU_ATTN, "another.Plugin")
    vllm.plugin.register()
    assert vllm.registry.CPU_ATTN.get_path() == "another.Plugin"


def test_older_versions_have_one_name_for_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_vllm.installed("0.17.1", names_of_plugins=False, ir=False) as found:
        plugin = importlib.import_module("layerzero.integrations.vllm")
        monkeypatch.setattr(plugin, "_version", lambda: "0.17.1")
        plugin.register()
        plugin.register()
        assert found.registry.CUSTOM.get_path().endswith(".LayerZeroBackend") and plugin.name() == "CUSTOM"
        fake_vllm.register_backend(found.registry.CUSTOM, "another.Plugin")
        with pytest.raises(ConfigurationError, match=r"CUSTOM is another\.Plugin") as raised:
            plugin.register()
        assert raised.value.code == "NAME_TAKEN"


@pytest.mark.parametrize(
    ("version", "said"), [("0.16.0", "vLLM 0.16.0 has an older interface"), (None, "vLLM is not installed")]
)
def test_a_version_that_does_not_fit_is_said_and_left_alone(
    version: str | None, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_vllm.installed() if version else nullcontext(SimpleNamespace(registry=None)) as found:
        plugin = importlib.import_module("layerzero.integrations.vllm")
        monkeypatch.setattr(plugin, "_version", lambda: version)
        if version is None:
            monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigurationError, match=said):
            plugin.register()
        plugin.plugin()
        assert said in caplog.text
        assert found.registry is None or "LAYERZERO" not in found.registry.__members__


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.stem)
def test_what_vllm_passes_is_accepted(path: Path, vllm: SimpleNamespace) -> None:
    """Each version calls these methods with its own parameters, by position or by name."""
    functions = json.loads(path.read_text(encoding="utf-8"))["functions"]
    ours = {"AttentionImpl": vllm.attention.LayerZeroImpl, "AttentionBackend": vllm.attention.LayerZeroBackend}
    ours["AttentionMetadataBuilder"] = vllm.attention.LayerZeroMetadataBuilder
    checked = 0
    for full, parameters in functions.items():
        owner, _, method = full.removeprefix("vllm.v1.attention.backend.").partition(".")
        mine = [p for p in inspect.signature(getattr(ours[owner], method)).parameters.values() if p.name != "self"]
        theirs = [entry.partition("=")[0] for entry in parameters]
        assert [p.name for p in mine][: len(theirs)] == theirs, full
        needed = [p.name for p in mine if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        assert set(needed) <= set(theirs), full
        checked += 1
    assert checked == 8


# --- a step ---------------------------------------------------------------------------------------------------------------


class Requests:
    """Requests with random keys and values, and their pages: what vLLM's scheduler has.

    The first ``common`` tokens of all of them are the same, and the pages that these fill are shared, as by prefix caching.
    """

    def __init__(self, lengths: list[int], new: list[int], seed: int = 0, common: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.new = lengths, new
        self.keys = [torch.randn(n, KV_HEADS, WIDTH, generator=generator) for n in lengths]
        self.values = [torch.randn(n, KV_HEADS, WIDTH, generator=generator) for n in lengths]
        self.query = torch.randn(sum(new), HEADS, WIDTH, generator=generator)
        needed = [-(-n // PAGE) for n in lengths]
        order = (torch.randperm(sum(needed), generator=generator) + 1).tolist()
        self.count = sum(needed) + 1
        self.tables = [[order.pop() for _ in range(n)] for n in needed]
        for row in range(1, len(lengths)):
            self.tables[row][: common // PAGE] = self.tables[0][: common // PAGE]
            for mine, first in ((self.keys[row], self.keys[0]), (self.values[row], self.values[0])):
                mine[:common] = first[:common]

    def slots(self, row: int, first: int, last: int) -> list[int]:
        return [self.tables[row][at // PAGE] * PAGE + at % PAGE for at in range(first, last)]

    def common(self, columns: int = 12, padding: int = 0) -> SimpleNamespace:
        """vLLM's description; ``padding`` rows without tokens of their own fill it up, as in a graph."""
        tables = torch.full((len(self.lengths) + padding, columns), 99, dtype=torch.int32)
        for row, pages in enumerate(self.tables):
            tables[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        starts = torch.tensor([0, *self.new, *[1] * padding], dtype=torch.int32).cumsum(0).to(torch.int32)
        slots = [s for row, n in enumerate(self.lengths) for s in self.slots(row, n - self.new[row], n)] + [
            -1
        ] * padding
        return SimpleNamespace(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([*self.lengths, *[0] * padding], dtype=torch.int32),
            num_reqs=len(self.lengths) + padding,
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(self.new),
            max_seq_len=max(self.lengths),
            block_table_tensor=tables,
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            causal=True,
        )

    def right(self, window: int | None, softcap: float, scale: float) -> torch.Tensor:
        """Attention by its definition in float64, query by query, without pages."""
        results, first = [], 0
        for k, v, length, new in zip(self.keys, self.values, self.lengths, self.new, strict=True):
            for at in range(new):
                position = length - new + at
                low = 0 if window is None else max(0, position - window + 1)
                for head in range(HEADS):
                    group = head // (HEADS // KV_HEADS)
                    scores = k[low : position + 1, group].double() @ self.query[first + at, head].double() * scale
                    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                    results.append(scores.softmax(0) @ v[low : position + 1, group].double())
            first += new
        return torch.stack(results).view(first, HEADS, WIDTH)


def _cache(form: str, count: int) -> torch.Tensor:
    """A layer's cache as vLLM gives it."""
    if form == "keys, values":
        return torch.zeros(2, count, PAGE, KV_HEADS, WIDTH)
    if form == "heads outside":
        return torch.zeros(count, KV_HEADS, PAGE, 2 * WIDTH)
    return torch.zeros(count, PAGE, KV_HEADS, 2 * WIDTH).transpose(1, 2)


def _fill(attention: Any, cache: torch.Tensor, asked: Requests) -> None:
    """The tokens of earlier steps."""
    keys, values, layout = attention.pages(cache, WIDTH)
    for row, (length, new) in enumerate(zip(asked.lengths, asked.new, strict=True)):
        for at, slot in enumerate(asked.slots(row, 0, length - new)):
            place = (slot // PAGE, slot % PAGE) if layout == "NHD" else (slot // PAGE, slice(None), slot % PAGE)
            keys[place], values[place] = asked.keys[row][at], asked.values[row][at]


def _builder(attention: Any, device: str = "cpu", sizes: tuple[int, ...] = (), prefixes: bool = False) -> Any:
    mode = SimpleNamespace(has_full_cudagraphs=lambda: True)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=list(sizes)),
        cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
    )
    return attention.LayerZeroMetadataBuilder(SimpleNamespace(block_size=PAGE), ["a"], config, torch.device(device))


@pytest.mark.parametrize("said", [None, False])
@pytest.mark.parametrize("prefixes", [False, True])
def test_shared_prefixes_are_expected_where_vllm_caches_prefixes(
    vllm: SimpleNamespace, prefixes: bool, said: bool | None
) -> None:
    """Unless somebody said that there are none."""
    lz.configure(shared_prefixes=said)
    try:
        _builder(vllm.attention, prefixes=prefixes)
        assert loading.setting("shared_prefixes") is (prefixes and said is None)
    finally:
        lz.configure(shared_prefixes=None)


def test_a_builder_is_the_first_thing_a_process_does() -> None:
    """Settings are there before anything else of LayerZero was used."""
    code = """
    import fake_vllm
    import test_vllm
    with fake_vllm.installed():
        from layerzero.integrations.vllm import attention
        test_vllm._builder(attention, prefixes=True)
        from layerzero import loading
        answer(loading.setting("shared_prefixes"))
    """
    assert answer(code, path=[Path(__file__).parent, SUPPORT]) is True


def _step(attention: Any, impl: Any, asked: Requests, form: str, padding: int = 0, more: int = 0) -> torch.Tensor:
    """A step through the builder and the implementation. ``more`` rows of the tensors are behind the batch's tokens."""
    cache = _cache(form, asked.count)
    _fill(attention, cache, asked)
    batch = _builder(attention).build(0, asked.common(padding=padding))
    rows = sum(asked.new) + padding + more
    fresh = [
        torch.cat([x[n - new :] for x, n, new in zip(all_, asked.lengths, asked.new, strict=True)])
        for all_ in (asked.keys, asked.values)
    ]
    key, value = (torch.cat((x, torch.full((padding + more, KV_HEADS, WIDTH), 7.0))) for x in fresh)
    query = torch.cat((asked.query, torch.ones(padding + more, HEADS, WIDTH)))
    output = torch.full((rows, HEADS, WIDTH), 5.0)
    given = impl.forward(None, query, key, value, cache, batch, output=output)
    assert given is output
    if more:
        assert bool((output[rows - more :] == 5.0).all()), "rows behind the batch are not written"
    return output[: sum(asked.new)]


FORMS = ("keys, values", "heads outside", "heads inside")
BATCHES = {
    "decode": ([5, 33, 64, 1], [1, 1, 1, 1]),
    "prefill": ([5, 33, 64], [5, 33, 64]),
    "pieces": ([40, 90], [17, 3]),
    "mixed": ([5, 70, 33, 64], [1, 1, 20, 64]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", BATCHES)
def test_a_step_is_attention_by_its_definition(batch: str, form: str, vllm: SimpleNamespace) -> None:
    asked = Requests(*BATCHES[batch])
    impl = vllm.attention.LayerZeroImpl(HEADS, WIDTH, 0.3, KV_HEADS)
    output = _step(vllm.attention, impl, asked, form, more=2)
    torch.testing.assert_close(output.double(), asked.right(None, 0.0, 0.3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("window", "softcap"), [(9, None), (1, None), (200, 3.0), (None, 2.0)])
def test_windows_and_softcap(batch: str, window: int | None, softcap: float | None, vllm: SimpleNamespace) -> None:
    asked = Requests(*BATCHES[batch], seed=1)
    impl = vllm.attention.LayerZeroImpl(HEADS, WIDTH, 0.25, KV_HEADS, None, window, "auto", softcap)
    output = _step(vllm.attention, impl, asked, "heads inside")
    torch.testing.assert_close(output.double(), asked.right(window, softcap or 0.0, 0.25), rtol=1e-5, atol=1e-5)


ALIKE = {
    "decode": ([100, 97, 130, 111, 96, 160], [1] * 6),
    "one request": ([100], [1]),
    "chunks": ([100, 140, 97], [4, 44, 1]),
    "mixed": ([98, 99, 100, 150], [1, 1, 4, 54]),
}


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (90, 2.0)])
@pytest.mark.parametrize("common", [16, 40, 95])
@pytest.mark.parametrize("batch", ALIKE)
def test_requests_that_begin_alike(
    batch: str, common: int, window: int | None, softcap: float | None, vllm: SimpleNamespace
) -> None:
    asked = Requests(*ALIKE[batch], seed=5, common=common)
    impl = vllm.attention.LayerZeroImpl(HEADS, WIDTH, 0.25, KV_HEADS, None, window, "auto", softcap)
    output = _step(vllm.attention, impl, asked, "heads inside")
    torch.testing.assert_close(output.double(), asked.right(window, softcap or 0.0, 0.25), rtol=1e-5, atol=1e-5)


def test_a_layer_goes_with_the_cache_that_it_is_given(vllm: SimpleNamespace) -> None:
    """Its views are made once for a cache; vLLM measures memory with another one before."""
    impl = vllm.attention.LayerZeroImpl(HEADS, WIDTH, 0.25, KV_HEADS)
    for seed in (6, 7):
        asked = Requests([5, 33], [1, 1], seed=seed)
        output = _step(vllm.attention, impl, asked, FORMS[seed % 3])
        torch.testing.assert_close(output.double(), asked.right(None, 0.0, 0.25), rtol=1e-5, atol=1e-5)
    cache = _cache("heads inside", 3)
    assert impl._views(cache) is impl._views(cache) and impl._views(_cache("heads inside", 3)) is not impl._views(cache)


def test_rows_that_fill_up_a_graph_change_nothing(vllm: SimpleNamespace) -> None:
    asked = Requests(*BATCHES["decode"], seed=2)
    impl = vllm.attention.LayerZeroImpl(HEADS, WIDTH, 0.25, KV_HEADS)
    output = _step(vllm.attention, impl, asked, "heads outside", padding=4)
    torch.testing.assert_close(output.double(), asked.right(None, 0.0, 0.25), rtol=1e-5, atol=1e-5)


def test_requests_without_a_query_are_no_decodes(vllm: SimpleNamespace) -> None:
    asked = Requests([5, 33, 20], [1, 0, 1], seed=3)
    impl = vllm.attention.LayerZeroImpl(HEADS, WIDTH, 0.25, KV_HEADS)
    batch = _builder(vllm.attention).build(0, asked.common())
    assert batch.num_decodes == 0 and batch.prefill_starts.tolist() == [0, 1, 1, 2]
    output = _step(vllm.attention, impl, asked, "heads inside")
    torch.testing.assert_close(output.double(), asked.right(None, 0.0, 0.25), rtol=1e-5, atol=1e-5)


def test_a_layer_that_shares_its_cache_writes_nothing(vllm: SimpleNamespace) -> None:
    asked = Requests([5, 33], [1, 1], seed=4)
    impl = vllm.attention.LayerZeroImpl(HEADS, WIDTH, 0.25, KV_HEADS, kv_sharing_target_layer_name="another")
    cache = torch.zeros(asked.count, KV_HEADS, PAGE, 2 * WIDTH)
    new = torch.ones(2, KV_HEADS, WIDTH)
    impl.forward(
        None,
        asked.query,
        new,
        new,
        cache,
        _builder(vllm.attention).build(0, asked.common()),
        torch.empty(2, HEADS, WIDTH),
    )
    assert not cache.any()


def test_decodes_come_first_and_tables_are_as_wide_as_needed(vllm: SimpleNamespace) -> None:
    asked = Requests(*BATCHES["mixed"])
    builder = _builder(vllm.attention)
    batch = builder.build(0, asked.common())
    assert builder.reorder_batch_threshold == 1
    assert batch.num_decodes == 2 and batch.prefill_starts.tolist() == [0, 20, 84]
    # 70 tokens are five pages: eight columns of the table's twelve.
    assert batch.decode_tables.shape == (2, 8) and batch.prefill_tables.shape == (2, 8)
    assert batch.prefill_lens.tolist() == [33, 64] and not batch.graph
    common = asked.common()
    common.max_seq_len = 192
    assert builder.build(0, common).decode_tables.shape == (2, 12)


def test_a_step_that_vllm_may_capture_is_made_ready_once(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Requests(*BATCHES["decode"])
    builder = _builder(vllm.attention, "cuda", (1, 2, 4))
    batch = builder.build(0, asked.common())
    assert batch.graph and builder._cudagraph_support is fake_vllm.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert not builder.build(0, Requests([5, 6, 7], [1, 1, 1]).common()).graph, "no graph of three rows is captured"
    assert not builder.build(0, Requests(*BATCHES["mixed"]).common()).graph
    entered: list[Any] = []
    monkeypatch.setattr(vllm.attention.lz, "capture", lambda stream: entered.append(stream) or nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "a stream")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cache = torch.zeros(asked.count, KV_HEADS, PAGE, 2 * WIDTH)
    new = torch.ones(4, KV_HEADS, WIDTH)
    for _ in range(2):
        impl = vllm.attention.LayerZeroImpl(HEADS, WIDTH, 0.25, KV_HEADS)
        impl.forward(None, asked.query, new, new, cache, batch, torch.empty(4, HEADS, WIDTH))
    assert entered == ["a stream"], "the second layer is of the same kind"
    vllm.attention.LayerZeroImpl(HEADS, WIDTH, 0.25, KV_HEADS, None, 8).forward(
        None, asked.query, new, new, cache, batch, torch.empty(4, HEADS, WIDTH)
    )
    assert len(entered) == 2, "a layer with a window is another kind"


def test_a_captured_batch_reads_vllms_own_tensors(vllm: SimpleNamespace) -> None:
    """A replay reads what vLLM wrote into its tensors since the capture: other lengths, other pages, fewer requests."""
    asked = Requests(*BATCHES["decode"], seed=5)
    common = asked.common()
    table, lens, slots = common.block_table_tensor, common.seq_lens, common.slot_mapping
    builder = _builder(vllm.attention, "cuda")
    batch = builder.build_for_cudagraph_capture(common)
    assert batch.graph and not builder.build(0, common).graph, "no size is announced, and this one is captured"
    whole = (batch.decode_tables, batch.decode_lens, batch.slot_mapping)
    for mine, vllms in zip(whole, (table, lens, slots), strict=True):
        assert mine.shape == vllms.shape and mine.data_ptr() == vllms.data_ptr()
    assert not builder.build_for_cudagraph_capture(Requests(*BATCHES["mixed"]).common()).graph

    # As a replay does: vLLM overwrites its tensors, and attention runs on the description of the capture.
    cache = _cache("keys, values", 99)
    impl = vllm.attention.LayerZeroImpl(HEADS, WIDTH, 0.25, KV_HEADS)
    later = Requests([18, 40], [1, 1], seed=6)
    _fill(vllm.attention, cache, later)
    padded = later.common(padding=len(lens) - 2)
    for mine, theirs in ((table, padded.block_table_tensor), (lens, padded.seq_lens), (slots, padded.slot_mapping)):
        mine.copy_(theirs)
    table[2:] = 0
    new = [
        torch.cat([x[-1:] for x in rows] + [torch.ones(len(lens) - 2, KV_HEADS, WIDTH)])
        for rows in (later.keys, later.values)
    ]
    query = torch.cat((later.query, torch.ones(len(lens) - 2, HEADS, WIDTH)))
    output = impl.forward(None, query, *new, cache, replace(batch, graph=False), torch.empty(len(lens), HEADS, WIDTH))
    torch.testing.assert_close(output[:2].double(), later.right(None, 0.0, 0.25), rtol=1e-5, atol=1e-5)


def test_memory_is_measured_without_a_batch(vllm: SimpleNamespace) -> None:
    impl = vllm.attention.LayerZeroImpl(HEADS, WIDTH, 0.25, KV_HEADS)
    output = torch.full((3, HEADS, WIDTH), 5.0)
    query = torch.ones_like(output)
    assert not impl.forward(None, query, query, query, torch.zeros(0), None, output).any()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"alibi_slopes": [0.1] * 4}, "does not serve alibi_slopes(.|\\n)*use another attention backend"),
        ({"sinks": torch.zeros(4)}, "does not serve sinks"),
        ({"attn_type": fake_vllm.AttentionType.ENCODER_ONLY}, "attn_type=.*ENCODER_ONLY"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt"),
    ],
)
def test_what_is_not_served_is_refused(given: dict[str, Any], said: str, vllm: SimpleNamespace) -> None:
    with pytest.raises(lz.InvalidCallError, match=said):
        vllm.attention.LayerZeroImpl(HEADS, WIDTH, 0.25, KV_HEADS, **given)


def test_what_changes_nothing_is_accepted(vllm: SimpleNamespace) -> None:
    vllm.attention.LayerZeroImpl(HEADS, WIDTH, 0.25, KV_HEADS, use_alibi_sqrt=False, chunk_lookback=-1, sinks=None)


def test_batches_and_caches_of_another_kind_are_refused(vllm: SimpleNamespace) -> None:
    common = Requests([5], [5]).common()
    common.causal = False
    with pytest.raises(lz.InvalidCallError, match="does not serve a batch with causal=False"):
        _builder(vllm.attention).build(0, common)
    with pytest.raises(lz.InvalidCallError, match=r"shape \(3, 2, 16, 20\) for heads of 16"):
        vllm.attention.pages(torch.zeros(3, 2, 16, 20), WIDTH)
    impl = vllm.attention.LayerZeroImpl(HEADS, WIDTH, 0.25, KV_HEADS)
    x = torch.zeros(1, HEADS, WIDTH)
    with pytest.raises(lz.InvalidCallError, match="does not serve a quantized output"):
        impl.forward(None, x, x, x, torch.zeros(0), None, x, output_scale=torch.ones(1))
    with pytest.raises(lz.InvalidCallError, match="output is None"):
        impl.forward(None, x, x, x, torch.zeros(0), None)


# --- the IR ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_provider_computes_the_operations_definition(
    dtype: torch.dtype, weighted: bool, vllm: SimpleNamespace
) -> None:
    vllm.plugin.register()
    vllm.plugin.register()
    x, residual = torch.randn(2, 5, 32).to(dtype).unbind()
    weight = torch.randn(32).to(dtype) if weighted else None
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for op, tensors in ((vllm.ops.rms_norm, (x, weight)), (vllm.ops.fused_add_rms_norm, (x, residual, weight))):
        takes = op.takes["layerzero"]
        assert takes(*tensors, 1e-5) and not takes(*tensors, 1e-5, 16)
        assert weight is None or not takes(*tensors[:-1], weight.double(), 1e-5)
        before = [None if one is None else one.clone() for one in tensors]
        torch.testing.assert_close(op.impls["layerzero"](*tensors, 1e-5), op.native(*tensors, 1e-5), **close)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(before, tensors, strict=True)), "inputs are kept"
