"""What calls become in compiled graphs: torch code, one kernel, or an operator that selects; and what compiles them again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import layerzero as lz
import pytest
import torch
import torch_references as reference
from gradients import assert_same, gradients
from layerzero import loading
from layerzero.integrations.torch_operators import choices
from layerzero.integrations.torch_operators.operators import LOWERABLE
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch_cases import BY_ID, CASES, Case, assert_right, doubled, expected, run

pytestmark = [
    pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning"),
    pytest.mark.usefixtures("restored"),
]

ROWS, WEIGHT = torch.linspace(-1.0, 1.0, 48).reshape(3, 16), torch.linspace(0.5, 1.5, 16)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    lz.compile_report(clear=True)
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that keeps the graphs it is given, forward and backward, and runs them as they are."""

    def __init__(self) -> None:
        self.made: list[torch.fx.GraphModule] = []
        self.traced = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.traced += 1

        def keep(made: torch.fx.GraphModule, _: Any) -> Any:
            self.made.append(made)
            return made

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)

    def ours(self) -> list[tuple[str, str]]:
        """Our operators in the graphs, each with how its kernel is chosen."""
        found = []
        for graph in self.made:
            for node in graph.graph.nodes:
                if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "layerzero":
                    names = [argument.name for argument in node.target._schema.arguments]
                    found.append((node.target._opname, str(node.args[names.index("lowering")])))
        return found


def compiled(function: Callable[..., Any], dynamic: bool | None = None) -> tuple[Any, Graphs]:
    """A function compiled as one graph, and the graphs."""
    graphs = Graphs()
    made = torch.compile(
        lambda *args, **kwargs: function(*args, **kwargs), backend=graphs, fullgraph=True, dynamic=dynamic
    )
    return made, graphs


def report() -> list[tuple[str, str, str | None]]:
    """What was compiled, without the words."""
    return [(call.function, call.lowered_to, call.kernel) for call in lz.compile_report().calls]


LOWERED = [case for case in CASES if case.function in LOWERABLE]


@pytest.mark.parametrize("case", LOWERED, ids=lambda case: case.id)
def test_calls_become_torch_code(case: Case) -> None:
    function, graphs = compiled(case.call, dynamic=False)
    assert_right(run(case, function), expected(case))
    assert graphs.ours() == []
    assert [(name, how) for name, how, _ in report()] == [(case.function, "torch")]


@pytest.mark.parametrize("case", [BY_ID["attention-window"], BY_ID["rope"], BY_ID["linear"]], ids=lambda case: case.id)
def test_sizes_that_vary_stay_so(case: Case) -> None:
    function, graphs = compiled(case.call, dynamic=True)
    for n in (5, 7, 9):
        assert_right(run(case, function, n), expected(case, n))
    assert graphs.ours() == [] and graphs.traced == 1


@pytest.mark.parametrize("case", [c for c in LOWERED if c.grads], ids=lambda case: case.id)
def test_gradients_are_torchs_own(case: Case) -> None:
    function, graphs = compiled(case.call)
    assert_same(gradients(case, function), gradients(case, case.reference, doubled))
    assert graphs.ours() == [] and len(graphs.made) == 2


def test_inference_mode_is_lowered_too() -> None:
    function, graphs = compiled(lz.rms_norm)
    with torch.inference_mode():
        assert_right((function(ROWS.clone(), WEIGHT.clone()),), (reference.rms_norm(ROWS.double(), WEIGHT.double()),))
    assert graphs.ours() == []


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize(
    ("seq_q", "seq_k", "given"),
    [
        (20, 20, {}),
        (4, 20, {}),
        (1, 20, {}),
        (20, 20, {"causal": False}),
        (20, 20, {"window": 3}),
        (4, 20, {"causal": False, "window": (3, 1)}),
        (20, 20, {"scale": -0.5}),
        (20, 20, {"scale": 0.0}),
        (5, 5, {"softcap": 2.0}),
    ],
    ids=str,
)
def test_attention_means_the_same(seq_q: int, seq_k: int, given: dict[str, Any], layout: str) -> None:
    """Bottom-right alignment, windows and shared heads, at sizes with and without torch's flash kernel."""
    made = [torch.randn(2, n, heads, 8) for n, heads in ((seq_q, 4), (seq_k, 2), (seq_k, 2))]
    wanted = reference.attention(*map(doubled, made), **given)
    if layout == "BHSD":
        made, wanted = [tensor.transpose(1, 2) for tensor in made], wanted.transpose(1, 2)
    function, graphs = compiled(lambda *t: lz.attention(*t, layout=layout, **given))
    assert_right((function(*made),), (wanted,))
    assert graphs.ours() == []


def test_a_query_that_may_attend_to_nothing_gives_zeros() -> None:
    made = [torch.randn(1, 20, 2, 8) for _ in range(3)]
    mask = torch.ones(20, 20, dtype=torch.bool)
    mask[7] = False
    function, graphs = compiled(lambda *t: lz.attention(*t, causal=False, attn_mask=mask))
    result = function(*made)
    assert result[:, 7].abs().max() == 0.0
    assert_right((result,), (reference.attention(*map(doubled, made), causal=False, attn_mask=mask),))
    assert graphs.ours() == []


def test_the_layout_in_force_is_the_calls() -> None:
    made = [torch.randn(2, 20, 4, 8) for _ in range(3)]
    function, graphs = compiled(lz.attention)
    assert_right((function(*made),), (reference.attention(*map(doubled, made)),))
    turned = [tensor.transpose(1, 2).contiguous() for tensor in made]
    with lz.layout("BHSD"):
        assert_right((function(*turned),), (reference.attention(*map(doubled, made)).transpose(1, 2),))
    assert graphs.ours() == [] and graphs.traced == 2


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_results_lie_in_memory_as_the_graph_was_told(layout: str) -> None:
    """Whatever a call becomes: code after it may rely on strides."""
    made = [torch.randn(2, 20, 20, 8) for _ in range(3)]
    strides = set()
    for lowering in ("auto", "off"):
        lz.configure(compile={"lowering": lowering})
        function, _ = compiled(lambda *t: lz.attention(*t, layout=layout))
        strides.add(function(*made).stride())
    # Where heads come first, the sequence does in memory, as in results of torch's own function.
    assert strides == {(3200, 160, 8, 1) if layout == "BSHD" else (3200, 8, 160, 1)}


def test_half_precision_is_rounded_once() -> None:
    rows = (ROWS * 3).to(torch.bfloat16)
    function, _ = compiled(lambda x, w: lz.rms_norm(x, w))
    wanted = reference.rms_norm(rows.double(), WEIGHT.double())
    # The weight is float32.
    result = function(rows, WEIGHT)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, wanted.to(torch.bfloat16))


def test_a_gradient_that_is_summed_in_float32_stays_the_operators() -> None:
    table = torch.ones(4, 8, dtype=torch.bfloat16, requires_grad=True)
    function, graphs = compiled(lz.embedding)
    (grad,) = torch.autograd.grad(function(torch.zeros(600, dtype=torch.int64), table).sum(), table)
    assert grad[0, 0] == 600.0
    assert graphs.ours()[0] == ("embedding", "selected")


def test_autocast_is_followed() -> None:
    function, graphs = compiled(lambda x, w: (lz.linear(x, w), lz.rms_norm(x)))
    weight = torch.randn(24, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product, normed = function(ROWS, weight)
    assert (product.dtype, normed.dtype) == (torch.bfloat16, torch.float32)
    assert_right((product,), (reference.linear(ROWS.double(), weight.double()),), 5e-2)
    assert graphs.ours() == []


# --- policy -----------------------------------------------------------------------------------------------------------


def test_a_lock_keeps_its_kernel() -> None:
    wanted = (reference.rms_norm(ROWS.double(), WEIGHT.double()),)
    for kernel, said in (("torch.rms_norm.composed", "=torch.rms_norm.composed"), ("lz_cpu.ref.norm.rms", "selected")):
        lz.force_kernel("norm.rms", kernel)
        function, graphs = compiled(lz.rms_norm)
        assert_right((function(ROWS, WEIGHT),), wanted)
        # A second call runs without the engine.
        assert_right((function(ROWS, WEIGHT),), wanted)
        assert graphs.ours() == [("rms_norm", said)]
        call = lz.compile_report(clear=True).calls[-1]
        assert call.kernel == kernel and "lock" in call.why
        torch._dynamo.reset()


def test_a_lock_on_what_torch_would_run_is_torch_code() -> None:
    lz.force_kernel("norm.rms", "torch.rms_norm")
    function, graphs = compiled(lz.rms_norm)
    function(ROWS, WEIGHT)
    assert graphs.ours() == []


def test_a_library_that_is_denied_is_not_used() -> None:
    with lz.disabled("torch", "onednn"):
        function, graphs = compiled(lz.gelu)
        assert_right((function(ROWS),), (reference.gelu(ROWS.double()),))
    assert graphs.ours() == [("gelu", "selected")]
    ((name, how, kernel),) = report()
    assert (name, how) == ("gelu", "operator")
    assert kernel.startswith("lz_cpu.")


def test_a_kernel_of_ones_own_is_selected_at_every_call() -> None:
    """It is compared with the reference before it serves, which the engine does."""
    given: dict[str, Any] = {"operation": "norm.rms", "platform": "cpu", "supported_dtypes": ["float32"]}
    asked = []

    @lz.register_kernel(kernel_id="own.norm", priority=99, **given)
    def own(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        asked.append(input.shape)
        result = input * torch.rsqrt(input.square().mean(-1, keepdim=True) + eps)
        return result if weight is None else result * weight

    try:
        lz.force_kernel("norm.rms", "own.norm")
        function, graphs = compiled(lz.rms_norm)
        assert_right((function(ROWS, WEIGHT),), (reference.rms_norm(ROWS.double(), WEIGHT.double()),))
        assert graphs.ours() == [("rms_norm", "selected")] and ROWS.shape in asked
    finally:
        lz.unforce_kernel("norm.rms")
        lz.unregister_kernel("own.norm")


@pytest.mark.parametrize("said", [{"checked": True}, {"debug": True}, {"verify": "sample"}], ids=str)
def test_who_looks_at_every_call_gets_every_call(said: dict[str, Any]) -> None:
    lz.configure(**said)
    function, graphs = compiled(lz.gelu)
    function(ROWS)
    assert graphs.ours() == [("gelu", "selected")]


def test_a_kernel_that_fails_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    lz.force_kernel("norm.rms", "torch.rms_norm.composed")
    function, graphs = compiled(lz.rms_norm)
    wanted = (reference.rms_norm(ROWS.double(), WEIGHT.double()),)
    assert_right((function(ROWS, WEIGHT),), wanted)
    assert graphs.ours() == [("rms_norm", "=torch.rms_norm.composed")]
    failed = []

    def fails(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        failed.append(1)
        raise RuntimeError("out of memory, say")

    monkeypatch.setitem(loading.FUNCTIONS, "torch.rms_norm.composed", fails)
    assert_right((function(ROWS, WEIGHT),), wanted)
    assert failed == [1]


# --- settings ---------------------------------------------------------------------------------------------------------


def test_lowering_can_be_turned_off() -> None:
    lz.configure(compile={"lowering": "off"})
    function, graphs = compiled(lz.rms_norm)
    function(ROWS, WEIGHT)
    assert graphs.ours() == [("rms_norm", "selected")]
    assert lz.compile_report().calls[0].why == "compile.lowering is off"


def test_what_compiles_a_graph_again() -> None:
    """The setting ``compile.recompile``: never, policy."""
    for when, again in (("never", 1), ("policy", 2)):
        lz.configure(compile={"recompile": when})
        function, graphs = compiled(lz.rms_norm)
        for _ in range(2):
            function(ROWS, WEIGHT)
        assert graphs.traced == 1
        lz.force_kernel("norm.rms", "lz_cpu.ref.norm.rms")
        function(ROWS, WEIGHT)
        assert graphs.traced == again
        lz.unforce_kernel("norm.rms")
        lz.reset()
        torch._dynamo.reset()


def test_blocks_have_graphs_of_their_own() -> None:
    function, graphs = compiled(lz.gelu)
    for _ in range(2):
        function(ROWS)
        with lz.disabled("torch", "onednn"):
            function(ROWS)
    assert graphs.traced == 2 and graphs.ours() == [("gelu", "selected")]


def test_new_measurements_compile_again_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero import fingerprints

    for when, again in (("policy", 1), ("measurements", 2)):
        lz.configure(compile={"recompile": when})
        function, graphs = compiled(lz.gelu)
        function(ROWS)
        monkeypatch.setitem(fingerprints.SEEN, "measurements", f"another, {when}")
        function(ROWS)
        assert graphs.traced == again
        torch._dynamo.reset()


# --- measurements -----------------------------------------------------------------------------------------------------


def _candidate(
    kernel: str, backend: str, rank: int, time_us: float | None = None, policy: float = 0.0
) -> dict[str, Any]:
    terms = {"policy": policy}
    given = {"kernel_id": kernel, "backend": backend, "rank": rank, "time_us": time_us, "terms": terms}
    return {**given, "accepted": True, "transforms": []}


def _asked(*candidates: dict[str, Any], by: str = "ranking") -> dict[str, Any]:
    chosen = candidates[0]["kernel_id"]
    why = {"by": by, "message": "for a reason"}
    return {
        "chosen": chosen,
        "candidates": list(candidates),
        "why": why,
        "basis": "measured",
        "pieces": None,
        "baseline": "",
    }


@pytest.mark.parametrize(
    ("ours", "theirs", "function", "how"),
    [
        (10.0, 100.0, "rms_norm", "torch"),
        (10.0, 100.0, "rope", "torch"),
        (10.0, 200.0, "attention", "kernel"),
        (80.0, 100.0, "attention", "torch"),
        (1000.0, 1050.0, "linear", "torch"),
        (1000.0, 1500.0, "linear", "kernel"),
        (None, None, "linear", "kernel"),
        (None, None, "rms_norm", "torch"),
    ],
)
def test_a_kernel_must_gain_more_than_its_operator_costs(
    ours: float | None, theirs: float | None, function: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loading.FUNCTIONS, "fast.kernel", lambda: None)
    asked = _asked(_candidate("fast.kernel", "triton", 1, ours), _candidate("torch.kernel", "torch", 2, theirs))
    assert choices.from_report(asked, function, always=False, device_us={}).how == how


def test_the_time_of_the_device_counts_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loading.FUNCTIONS, "fast.kernel", lambda: None)
    asked = _asked(_candidate("fast.kernel", "triton", 1, 20.0), _candidate("torch.kernel", "torch", 2, 300.0))
    # Most of torch's 300 µs are the host's, which a compiled graph does not need.
    near = {"fast.kernel": 15.0, "torch.kernel": 30.0}
    assert choices.from_report(asked, "attention", always=False, device_us=near).how == "torch"
    far = {"fast.kernel": 15.0, "torch.kernel": 190.0}
    assert choices.from_report(asked, "attention", always=False, device_us=far).how == "kernel"
    half = {"fast.kernel": 15.0, "torch.kernel": None}
    assert choices.from_report(asked, "attention", always=False, device_us=half).how == "kernel"


def test_attention_that_nobody_timed_must_have_many_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loading.FUNCTIONS, "fast.kernel", lambda: None)
    asked = _asked(_candidate("fast.kernel", "triton", 1), _candidate("torch.kernel", "torch", 2))
    assert choices.from_report(asked, "attention", always=False, device_us={}, scores=8 * 1000.0**2).how == "torch"
    assert choices.from_report(asked, "attention", always=False, device_us={}, scores=8 * 4096.0**2).how == "kernel"
    assert choices.from_report(asked, "attention", always=False, device_us={}).how == "kernel"


def test_who_prefers_a_library_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loading.FUNCTIONS, "fast.kernel", lambda: None)
    preferred = _asked(_candidate("fast.kernel", "triton", 1, policy=50.0), _candidate("torch.kernel", "torch", 2))
    assert choices.from_report(preferred, "rms_norm", always=False, device_us={}).how == "kernel"
    assert choices.from_report(preferred, "rms_norm", always=True, device_us={}).how == "kernel"
    ranked = _asked(_candidate("fast.kernel", "triton", 1), _candidate("torch.kernel", "torch", 2))
    assert choices.from_report(ranked, "linear", always=False, device_us={}).how == "kernel"
    assert choices.from_report(ranked, "linear", always=True, device_us={}).how == "torch"


def test_a_kernel_of_ones_own_is_called_in_compiled_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loading.FUNCTIONS, "own.kernel", lambda: None)
    asked = _asked(_candidate("own.kernel", "own", 1), _candidate("torch.kernel", "torch", 2))
    assert choices.from_report(asked, "rms_norm", always=False, device_us={}).how == "kernel"


# --- export -----------------------------------------------------------------------------------------------------------


class Normed(torch.nn.Module):
    """Two calls as a module."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """A norm and an activation."""
        result: Tensor = lz.gelu(lz.rms_norm(x, w))
        return result


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_says_nothing_of_this_process(strict: bool) -> None:
    program = torch.export.export(Normed(), (ROWS, WEIGHT), strict=strict)
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    assert [node.target._opname for node in nodes] == ["rms_norm", "gelu"]
    for node in nodes:
        names = [argument.name for argument in node.target._schema.arguments]
        assert len(node.args) <= names.index("lowering") and "lowering" not in node.kwargs


@pytest.mark.skipif(os.environ.get("LZ_TEST_SCALE") != "full", reason="the C++ compiler needs half a minute")
def test_a_program_compiled_ahead_of_time_is_lowered(tmp_path: Any) -> None:
    import torch._inductor.config

    program = torch.export.export(Normed(), (ROWS, WEIGHT))
    quick = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    with torch._inductor.config.patch(quick):
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    assert [(name, how) for name, how, _ in report()] == [("rms_norm", "torch"), ("gelu", "torch")]
    loaded = torch._inductor.aoti_load_package(path)
    wanted = reference.gelu(reference.rms_norm(ROWS.double(), WEIGHT.double()))
    assert_right((loaded(ROWS, WEIGHT),), (wanted,))


def test_the_report_prints_and_is_data() -> None:
    assert "no graph" in str(lz.compile_report())
    function, _ = compiled(lambda x, w: lz.rms_norm(lz.gelu(x), w), dynamic=True)
    function(ROWS, WEIGHT)
    shown = lz.compile_report()
    assert "~3" in str(shown) and "torch.gelu" in str(shown)
    assert [call["function"] for call in shown.to_dict()["calls"]] == ["gelu", "rms_norm"]
    lz.compile_report(clear=True)
    assert lz.compile_report().calls == []
