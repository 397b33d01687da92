"""Which calls a model makes: compared with what it really calls, and with what each call really runs."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import layerzero as lz
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from layerzero.equivalents import EQUIVALENTS
from layerzero.models import Call, DryRun, UntraceableModelError, calls_of, dry_run, model_hash
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Block(nn.Module):
    """A layer as language models have them, by LayerZero's functions or by torch's."""

    def __init__(self, width: int, heads: int, kv_heads: int, ours: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.ours = heads, kv_heads, ours
        self.head_dim = width // heads
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = lz.rms_norm(x, self.norm.weight, 1e-6) if self.ours else self.norm(x)
        heads = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = self.qkv(y).view(batch, length, -1, self.head_dim).split(heads, dim=2)
        if self.ours:
            y = lz.attention(q, k, v, causal=True, layout="BSHD").flatten(2)
        else:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        gate, up = self.gate(x), self.up(x)
        return x + self.down(lz.silu_mul(gate, up) if self.ours else F.silu(gate) * up)


class Model(nn.Module):
    """An embedding and some layers."""

    def __init__(self, layers: int = 3, width: int = 16, heads: int = 4, kv_heads: int = 2, ours: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Block(width, heads, kv_heads, ours) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.gelu(self.norm(x))


IDS = torch.arange(10).view(2, 5)


def by_op(run: DryRun) -> Counter[str]:
    counts: Counter[str] = Counter()
    for call in run.calls:
        counts[call.op] += call.count
    return counts


@pytest.mark.parametrize("ours", [True, False])
@torch.no_grad()
def test_every_call_is_seen_with_its_place_and_count(ours: bool) -> None:
    run = dry_run(Model(ours=ours), IDS)
    assert by_op(run) == {
        "embedding.lookup": 1,
        "norm.rms": 3,
        "mlp.linear": 15,
        "attention.gqa.prefill": 3,
        "activation.silu_mul": 3,
        "norm.layer": 1,
        "activation.gelu": 1,
    }
    places = {(call.module, call.op): call.count for call in run.calls}
    assert places["layers.*.qkv", "mlp.linear"] == 3
    assert places["layers.*", "attention.gqa.prefill"] == 3
    assert places["norm", "norm.layer"] == places["embed", "embedding.lookup"] == 1
    assert run.skipped == []


class Counting(TorchDispatchMode):
    """What really reaches torch's kernels, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_counts_are_those_of_a_real_run() -> None:
    model = Model(ours=False)
    with Counting() as real:
        model(IDS)
    counts = by_op(dry_run(model, IDS))
    products = real.counts["addmm"] + real.counts["mm"] + real.counts["bmm"] + real.counts["linear"]
    assert counts["mlp.linear"] == products
    assert counts["attention.gqa.prefill"] == sum(n for name, n in real.counts.items() if "scaled_dot_product" in name)
    assert counts["norm.layer"] == real.counts["native_layer_norm"]
    assert counts["embedding.lookup"] == real.counts["embedding"]
    assert counts["activation.gelu"] == real.counts["gelu"]
    assert counts["activation.silu_mul"] == real.counts["silu"]


def calls_by_kernel() -> Counter[str]:
    return Counter({kernel: told["calls"] for kernel, told in lz.health().kernels.items()})


@settings(max_examples=25)
@given(
    layers=st.integers(0, 3),
    heads=st.sampled_from([(2, 2), (4, 2), (4, 1)]),
    head_dim=st.sampled_from([4, 8]),
    batch=st.integers(1, 3),
    length=st.integers(1, 6),
    grad=st.booleans(),
)
def test_the_kernels_told_are_the_kernels_run(
    layers: int, heads: tuple[int, int], head_dim: int, batch: int, length: int, grad: bool
) -> None:
    model = Model(layers, heads[0] * head_dim, *heads)
    ids = torch.zeros(batch, length, dtype=torch.int64)
    with torch.set_grad_enabled(grad):
        run = dry_run(model, ids)
        told = Counter[str]()
        for call in run.calls:
            if call.call.source.startswith("layerzero."):
                assert call.kernel_id is not None
                told[call.kernel_id] += call.count
        before = calls_by_kernel()
        model(ids)
    assert calls_by_kernel() - before == told


@pytest.mark.parametrize("grad", [True, False])
def test_gradients_count_as_they_would_here(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        calls = calls_of(Model(), IDS)
    assert {call.grad for call in calls if call.function in ("linear", "attention")} == {grad}


def test_no_kernel_runs_and_no_weight_is_made() -> None:
    ran = []

    @lz.register_kernel(
        operation="norm.rms", kernel_id="counted.rms", platform="cpu", supported_dtypes=["float32"], priority=99
    )
    def counted(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        ran.append(1)
        return F.rms_norm(input, input.shape[-1:], weight, eps)

    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Four TiB.
            self.wide = nn.Linear(1 << 20, 1 << 20, device="meta")
            self.norm = nn.Parameter(torch.ones(1 << 20, device="meta"))

        def forward(self, x: Tensor) -> Tensor:
            return lz.rms_norm(self.wide(x), self.norm)

    try:
        with torch.no_grad():
            run = dry_run(Huge(), lz.TensorSpec((1 << 20, 1 << 20), torch.float32))
            assert [(c.op, c.kernel_id) for c in run.calls][1] == ("norm.rms", "counted.rms")
            assert run.calls[0].shape == "rows=1048576 in_features=1048576 out_features=1048576"
        assert ran == []
    finally:
        lz.unregister_kernel("counted.rms")


class Cached(nn.Module):
    """Keeps what it has seen, in every way a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.past: Tensor | None = None
        self.all: list[Tensor] = []
        self.by_name: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x))
        self.steps += 1
        self.past = y if self.past is None else torch.cat([self.past, y])
        self.all.append(y)
        self.by_name["last"] = y
        self.new = y
        return self.past


def tensors_in(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Tensor):
        yield value


# Keeping what a module held looks at tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_the_model_is_as_it_was() -> None:
    model = Cached()
    model(torch.randn(3, 4))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    past, new, names = model.past, model.new, set(vars(model))
    assert len(calls_of(model, torch.randn(3, 4))) == 1
    assert model.past is past and model.new is new and set(vars(model)) == names
    assert len(model.all) == 1 and model.by_name == {"last": model.all[0]}
    for module in model.modules():
        assert not any(isinstance(tensor, FakeTensor) for tensor in tensors_in(vars(module)))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    fresh = Cached()
    calls_of(fresh, torch.randn(3, 4))
    assert fresh.past is None and fresh.all == [] and fresh.by_name == {} and not hasattr(fresh, "new")


def test_other_threads_may_use_the_model_meanwhile() -> None:
    model, stop, wrong = Model(layers=1), threading.Event(), []
    with torch.no_grad():
        right = model(IDS)

    @torch.no_grad()
    def serve() -> None:
        while not stop.is_set():
            got = model(IDS)
            if type(got) is not Tensor or not torch.allclose(got, right):
                wrong.append(got)
                return

    server = threading.Thread(target=serve)
    server.start()
    try:
        with torch.no_grad():
            for _ in range(10):
                calls_of(model, IDS)
    finally:
        stop.set()
        server.join()
    assert not wrong


ROWS = torch.randn(3, 2, 8)
Q = torch.randn(2, 4, 5, 8)
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]] = {
    "sdpa": (F.scaled_dot_product_attention, (Q, Q, Q), {}),
    "sdpa_causal": (F.scaled_dot_product_attention, (Q, Q, Q), {"is_causal": True, "scale": 0.3}),
    "sdpa_cross": (F.scaled_dot_product_attention, (Q[:, :, :2], Q, Q), {}),
    "sdpa_masked": (F.scaled_dot_product_attention, (Q, Q, Q), {"attn_mask": torch.randn(5, 5)}),
    "sdpa_bool": (F.scaled_dot_product_attention, (Q, Q, Q), {"attn_mask": torch.ones(2, 1, 5, 5).tril().bool()}),
    "sdpa_gqa": (F.scaled_dot_product_attention, (Q, Q[:, :2], Q[:, :2]), {"enable_gqa": True}),
    "sdpa_3d": (F.scaled_dot_product_attention, (Q[0], Q[0], Q[0]), {"attn_mask": torch.randn(4, 5, 5)}),
    "linear": (F.linear, (ROWS, torch.randn(5, 8), torch.randn(5)), {}),
    "linear_vector": (F.linear, (ROWS[0, 0], torch.randn(5, 8)), {}),
    "rms_norm": (F.rms_norm, (ROWS, (8,), torch.randn(8)), {}),
    "rms_norm_2d": (F.rms_norm, (ROWS, (2, 8), torch.randn(2, 8), 1e-5), {}),
    "rms_norm_torch": (torch.rms_norm, (ROWS, (8,)), {}),
    "layer_norm": (F.layer_norm, (ROWS, (8,)), {"weight": torch.randn(8), "bias": torch.randn(8), "eps": 1e-3}),
    "layer_norm_2d": (F.layer_norm, (ROWS, (2, 8)), {"weight": torch.randn(2, 8)}),
    "layer_norm_torch": (torch.layer_norm, (ROWS, (8,)), {}),
    "embedding": (F.embedding, (IDS, torch.randn(10, 4)), {"padding_idx": 3}),
    "embedding_torch": (torch.embedding, (torch.randn(10, 4), IDS), {}),
    "gelu": (F.gelu, (ROWS,), {}),
    "gelu_tanh": (F.gelu, (ROWS,), {"approximate": "tanh"}),
}


@pytest.mark.parametrize("case", CASES)
def test_equivalents_compute_the_same(case: str) -> None:
    function, args, kwargs = CASES[case]
    found = EQUIVALENTS[function](*args, **kwargs)
    assert not isinstance(found, str), found
    name, arguments = found
    right = function(*args, **kwargs)
    ours = getattr(lz, name)(**arguments)
    torch.testing.assert_close(ours.reshape(right.shape), right, atol=1e-5, rtol=1e-5)
    # And seen in a model, it is one call.
    calls = calls_of(lambda *a: function(*a, **kwargs), *args)
    assert [(call.function, call.count) for call in calls] == [(name, 1)]


class Own(nn.Module):
    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.code = code

    def forward(self, *args: Any) -> Any:
        return self.code(*args)


@pytest.mark.parametrize(
    ("code", "args", "why"),
    [
        (lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True), (Q[:, :, :2], Q), "is_causal"),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k), (Q[None], Q[None]), "5 dimensions"),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k), (Q, Q[:1]), "batch"),
        (lambda i, w: F.embedding(i, w, max_norm=1.0), (IDS, torch.randn(10, 4)), "max_norm"),
    ],
)
def test_calls_that_mean_something_else_are_left_to_torch(code: Callable[..., Any], args: Any, why: str) -> None:
    run = dry_run(Own(code), *args)
    assert run.calls == []
    [(_, _, said)] = run.skipped
    assert why in said
    assert said in str(run) and "left to torch" in str(run)


def test_a_silu_alone_is_no_silu_mul() -> None:
    x = torch.randn(2, 8)
    assert calls_of(lambda x: F.silu(x) + x, x) == []
    assert calls_of(lambda x: F.silu(x) * 2.0, x) == []
    assert calls_of(lambda x: F.silu(x) * x[:1], x) == []
    for product in (lambda x: x * F.silu(x), lambda x: torch.mul(F.silu(x), x), lambda x: nn.SiLU()(x).mul_(x)):
        [call] = calls_of(product, x)
        assert call.function == "silu_mul"


def test_attention_modules_are_looked_into() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, dim_feedforward=32, batch_first=True, activation="gelu").eval()
    with torch.no_grad():
        run = dry_run(layer, torch.randn(2, 5, 16))
    assert by_op(run) == {
        "mlp.linear": 4,
        "attention.standard.prefill": 1,
        "norm.layer": 2,
        "activation.gelu": 1,
    }
    [attention] = [call for call in run.calls if call.op.startswith("attention")]
    assert attention.module == "self_attn"
    assert "batch=2 seq_q=5 seq_k=5 heads=4 kv_heads=4 head_dim=4" in attention.shape


def test_autocast_is_seen() -> None:
    def dtypes(code: Callable[..., Any], *args: Any) -> set[str]:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            [call] = calls_of(code, *args)
        return {tensor["dtype"] for tensor in json.loads(call.spec)["tensors"].values()}

    x, w = torch.randn(2, 8), torch.randn(4, 8)
    assert dtypes(F.linear, x, w) == dtypes(lz.linear, x, w) == {"bfloat16"}
    assert dtypes(lambda q: F.scaled_dot_product_attention(q, q, q), Q) == {"bfloat16"}
    assert dtypes(lambda x: F.layer_norm(x, (8,)), x) == {"float32"}


def test_a_call_is_written_down() -> None:
    q = torch.randn(2, 5, 4, 8)
    [call] = calls_of(lambda q: lz.attention(q, q, q, causal=False, window=(3, 0), softcap=2.0, layout="BSHD"), q)
    tensor = {"dtype": "float32", "shape": [2, 5, 4, 8]}
    assert json.loads(call.spec) == {
        "op": "attention",
        "tensors": {"key": tensor, "query": tensor, "value": tensor},
        "params": {"causal": False, "softcap": 2.0, "window_left": 3, "window_right": 0},
        "layout": "BSHD",
    }
    [call] = calls_of(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), q.transpose(1, 2))
    strided = {"dtype": "float32", "shape": [2, 4, 5, 8], "strides": [160, 8, 32, 1]}
    assert json.loads(call.spec) == {
        "op": "attention",
        "tensors": {"key": strided, "query": strided, "value": strided},
        "layout": "BHSD",
    }
    [call] = calls_of(lambda x: lz.layer_norm(x, (2, 8)), ROWS)
    assert json.loads(call.spec) == {
        "op": "norm.layer",
        "tensors": {"input": {"dtype": "float32", "shape": [3, 16]}},
    }
    packed, scales = torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 1)
    [call] = calls_of(lambda v, s: lz.dequantize(v, s, format="int4"), packed, scales)
    assert json.loads(call.spec)["tensors"]["values"] == {"dtype": "int4", "shape": [4, 32]}


def test_inputs_may_be_described_and_elsewhere() -> None:
    model = nn.Linear(8, 4, device="meta")
    [call] = calls_of(model, lz.TensorSpec((2, 8), "float32", "cuda:0"))
    assert call.device == "cuda:0"
    [call] = calls_of(model, torch.empty(2, 8, device="meta"))
    assert call.device == "cpu"
    [call] = calls_of(nn.Linear(8, 4), lz.TensorSpec((2, 8)))
    assert (call.device, call.module) == ("cpu", "")


def test_values_of_the_models_own_tensors_can_be_read() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("deep", torch.tensor(True))
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.linear(x)) if self.deep else x

    [call] = calls_of(Scaled(), ROWS)
    assert call.count == 2


def test_inputs_of_the_model_itself() -> None:
    model = nn.Linear(8, 4)
    with pytest.raises(lz.InvalidCallError, match="neither dummy_inputs nor example_inputs") as error:
        dry_run(model)
    assert error.value.code == "NO_EXAMPLE_INPUTS" and "TensorSpec" in error.value.hint
    model.example_inputs = (ROWS,)
    assert calls_of(model)[0].count == 1
    del model.example_inputs
    model.dummy_inputs = {"input": ROWS[0]}
    assert json.loads(calls_of(model)[0].spec)["tensors"]["input"]["shape"] == [2, 8]


class Stubborn(nn.Module):
    def __init__(self, step: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(8, 8), step

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return self.step(x)  # the line in question


@torch.library.custom_op("lz_tests::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x + 1


LIBRARY = torch.library.Library("lz_tests", "FRAGMENT")
LIBRARY.define("bare(Tensor x) -> Tensor")
LIBRARY.impl("bare", lambda x: x + 1, "CPU")


@pytest.mark.parametrize(
    ("step", "named", "hint"),
    [
        (lambda x: x + 1 if x.sum() > 0 else x, "DataDependent", "values of a tensor"),
        (lambda x: x[x > 0], "DynamicOutputShape", "values of a tensor"),
        (lambda x: x.numpy(), "", "run the model"),
        (opaque, "no fake impl", "torch.library.register_fake"),
        (torch.ops.lz_tests.bare, "UnsupportedOperator", "torch.library.register_fake"),
        (lambda x: F.linear(x, torch.ones(3, 3)), "RuntimeError", "run the model"),
        (lambda x: lz.rms_norm(x, torch.ones(3)), "InvalidCallError", "run the model"),
    ],
)
def test_models_that_cannot_be_traced_say_where(step: Callable[[Tensor], Any], named: str, hint: str) -> None:
    outer = nn.Sequential(nn.Linear(8, 8), Stubborn(step))
    with pytest.raises(UntraceableModelError) as error:
        calls_of(outer, torch.randn(2, 8))
    assert error.value.module == "1"
    assert "test_models.py:" in error.value.location
    assert named in str(error.value) and hint in error.value.hint
    assert error.value.__cause__ is not None
    assert error.value.to_dict()["location"] == error.value.location


def test_a_forward_pass_that_fails_leaves_nothing_behind() -> None:
    model = Cached()
    with pytest.raises(UntraceableModelError):
        calls_of(nn.Sequential(model, Stubborn(lambda x: x.item())), torch.randn(3, 4))
    assert model.past is None and model.all == []
    assert type(model(torch.randn(3, 4))) is Tensor


def test_a_dry_run_reads_well() -> None:
    with torch.no_grad():
        run = dry_run(Model(layers=2), IDS)
    lines = str(run).splitlines()
    assert lines[0].split() == ["module", "op", "shape", "count", "kernel", "basis", "time", "torch"]
    assert any(line.startswith("layers.*.qkv   mlp.linear") for line in lines)
    assert repr(run) == str(run)
    shown = run._repr_html_()
    assert shown.count("<tr>") == len(run.calls) + 1 and "layers.*.qkv" in shown
    data = json.loads(json.dumps(run.to_dict()))
    assert data["schema_version"] == "1.0"
    assert data["calls"][0]["call"]["call"]["op"] == "embedding.lookup"
    assert {call["kernel_id"] for call in data["calls"]} == {call.kernel_id for call in run.calls}


def test_no_kernel_is_told_with_its_reasons() -> None:
    run = dry_run(Own(lambda x: lz.rms_norm(x)), lz.TensorSpec((2, 8), "float32", "cuda:7"))
    [call] = run.calls
    assert call.kernel_id is None and call.reason is not None
    assert call.reason in str(run)


def test_calls_can_be_compared_and_kept() -> None:
    first, second = calls_of(Model(), IDS), calls_of(Model(), IDS)
    assert first == second and len({*first, *second}) == len(first)
    assert all(isinstance(call, Call) and json.loads(json.dumps(call.to_dict())) for call in first)


def test_a_models_hash_is_of_what_it_is() -> None:
    assert model_hash(Model()) == model_hash(Model())
    assert model_hash(Model()) == model_hash(torch.nn.Module.to(Model(), "meta"))
    assert len({model_hash(m) for m in (Model(), Model(layers=2), Model(width=32), Model().half())}) == 4
    small: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 2, "dtype": torch.float32}
    config = SimpleNamespace(to_dict=lambda: {**small, "transformers_version": "5.0", "_name_or_path": "/here"})
    other = SimpleNamespace(to_dict=lambda: {**small, "transformers_version": "5.1", "_name_or_path": "/there"})
    assert model_hash(SimpleNamespace(config=config)) == model_hash(SimpleNamespace(config=other))
    assert model_hash(SimpleNamespace(config=config)) == model_hash(SimpleNamespace(config=small))
    wider = SimpleNamespace(config={**small, "hidden_size": 16})
    assert model_hash(SimpleNamespace(config=small)) != model_hash(wider)
    with pytest.raises(lz.InvalidCallError, match="neither a configuration nor modules"):
        model_hash(lambda x: x)
