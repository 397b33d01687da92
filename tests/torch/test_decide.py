"""`lz.decide`: what a plan decides, when it counts, and what stands above it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from faults.states import fresh
from torch import Tensor, nn

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")


@pytest.fixture
def two_kernels() -> Iterator[dict[str, int]]:
    """Two kernels whose results tell them apart, the first preferred; and how often each has run."""
    given = {"operation": "norm.rms", "platform": "cpu", "supported_dtypes": ["float32"]}
    ran = {"one": 0, "two": 0}

    @lz.register_kernel(kernel_id="one.norm", priority=60, deterministic=True, **given)
    def one(input: Tensor, eps: float) -> Tensor:
        ran["one"] += 1
        return input + 1.0

    @lz.register_kernel(kernel_id="two.norm", priority=55, **given)
    def two(input: Tensor, eps: float) -> Tensor:
        ran["two"] += 1
        if ran.get("broken"):
            raise RuntimeError("the second is broken")
        return input + 2.0

    fresh()
    yield ran
    fresh()
    for kernel in ("one.norm", "two.norm"):
        if kernel in {k.kernel_id for k in lz.list_kernels("norm.rms")}:
            lz.unregister_kernel(kernel)


class Norm(nn.Module):
    """One call of LayerZero's."""

    def forward(self, x: Tensor) -> Tensor:
        """A norm."""
        return lz.rms_norm(x)


def plan_of_two(*inputs: Any, **said: Any) -> lz.Plan:
    """A plan that decided for the second kernel, which is not what is selected without it."""
    with lz.prefer("two"):
        return lz.decide(Norm(), *(inputs or (X,)), **said)


def by(result: Tensor, x: Tensor = X) -> str:
    """Who served, by what it gave."""
    return {1.0: "one", 2.0: "two"}.get((result - x).mean().round(decimals=4).item(), "another")


class Block(nn.Module):
    """A block of a transformer, with LayerZero's functions and torch's."""

    def __init__(self, hidden: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        q, k, v = self.qkv(lz.rms_norm(x, self.weight)).unflatten(-1, (3 * self.heads, -1)).chunk(3, 2)
        return x + self.out(lz.attention(q, k, v, causal=True).flatten(2))


def in_float64(block: Block, x: Tensor) -> Tensor:
    """The same block by its formulas."""
    x = x.double()
    weight, bias = block.qkv.weight.double(), block.qkv.bias.double()
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * block.weight.double()
    q, k, v = (normed @ weight.T + bias).unflatten(-1, (3, block.heads, -1)).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return x + mixed @ block.out.weight.double().T + block.out.bias.double()


# --- a plan is its model ------------------------------------------------------------------------------------------------


def test_it_gives_what_the_model_gives() -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 9, 32)
    before = {name: parameter.clone() for name, parameter in block.named_parameters()}
    with torch.no_grad():
        plan = lz.decide(block, x)
        result = plan(x)
        assert torch.equal(result, block(x)) and torch.equal(plan(x=x), result)
    torch.testing.assert_close(result.double(), in_float64(block, x), rtol=1e-5, atol=1e-5)
    assert plan.model is block and plan.training and dict(plan.named_parameters()).keys() == before.keys()
    assert all(torch.equal(before[name], parameter) for name, parameter in block.named_parameters())
    assert {decision.op.partition(".")[0] for decision in plan.decisions} == {"attention", "norm"}


@pytest.mark.parametrize("inputs", [True, False])
def test_every_call_it_decided_is_decided_by_it(inputs: bool) -> None:
    told: list[str | None] = []

    class Asking(Block):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(lz.rms_norm(x, self.weight)).unflatten(-1, (3 * self.heads, -1)).chunk(3, 2)
            heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
            calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
                (lz.rms_norm, (x, self.weight), {}),
                (lz.attention, (q, k, v), {"causal": True}),
                (lz.attention, (*heads_first,), {"causal": False, "layout": "BHSD", "scale": 0.3}),
                (lz.attention, (q, k[:, :, :2], v[:, :, :2]), {"window": 3}),
                (lz.linear, (x, self.out.weight, self.out.bias), {}),
                (lz.layer_norm, (x, (9, 32)), {}),
                (lz.silu_mul, (x, x), {}),
            ]
            for function, args, kwargs in calls:
                function(*args, **kwargs)
            if type(x) is Tensor:
                told.extend(
                    lz.explain(function.__name__, *args, **kwargs).to_dict()["pinned_by"]
                    for function, args, kwargs in calls
                )
            return x

    model, x = Asking(), torch.randn(2, 9, 32)
    with torch.no_grad():
        plan = lz.decide(model, *([x] if inputs else []))
        plan(x)
        told.clear()
        plan(x)
    assert told == ["plan Asking"] * 7 and len(plan.decisions) == 7 and plan.mismatches == []


def test_gradients_are_those_of_the_model() -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 5, 32)
    plan = lz.decide(block, x)
    block(x).square().sum().backward()
    wanted = [parameter.grad.clone() for parameter in block.parameters() if parameter.grad is not None]
    block.zero_grad()
    plan(x).square().sum().backward()
    found = [parameter.grad for parameter in plan.parameters() if parameter.grad is not None]
    assert len(found) == len(wanted) == 5
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("two_kernels")
def test_what_the_model_has_can_be_asked_of_it() -> None:
    class Chatty(Norm):
        scale = 3.0

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def generate(self, x: Tensor) -> Tensor:
            return self(x)

    with lz.prefer("two"):
        plan = lz.decide(Chatty(), X)
    assert plan.scale == 3.0 and plan.inner is plan.model.inner and "generate" in dir(plan)
    assert by(plan.generate(X)) == "two" and by(plan.model.generate(X)) == "one"
    assert plan.eval() is plan and not plan.model.training and plan.train() is plan and plan.model.training
    assert len(plan.state_dict()) == 2 and [*plan.parameters()] == [*plan.model.parameters()]
    with pytest.raises(AttributeError, match="scale"):
        plan.scale = 4.0
    with pytest.raises(AttributeError, match="nothing_like_it"):
        plan.nothing_like_it  # noqa: B018
    with pytest.raises(AttributeError, match="__setstate__"):
        plan.__setstate__  # noqa: B018


def test_a_function_can_be_compiled() -> None:
    def step(x: Tensor) -> Tensor:
        return lz.gelu(x) * 2

    plan = lz.decide(step, X)
    assert torch.equal(plan(X), step(X)) and repr(plan) == "<Plan of step: 1 decisions>"
    assert lz.decide(step, X, model_id="mine").table.model_id == "mine"


def test_it_says_what_it_holds(two_kernels: dict[str, int]) -> None:
    plan = plan_of_two()
    (decision,) = plan.decisions
    assert (decision.op, decision.kernel_id, decision.basis, decision.time_us) == (
        "norm.rms",
        "two.norm",
        "declared",
        None,
    )
    assert decision.call["tensors"]["input"] == {"dtype": "float32", "shape": [4, 8]}
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["decisions"] == [decision.to_dict()] and data["learns"] is False and data["mismatches"] == []
    head, columns, row = str(plan).splitlines()
    assert head == f"plan of Norm on {plan.table.hardware_signature}" and columns.split()[0] == "op"
    assert "two.norm" in row and "declared" in row and "float32[4, 8]" in row
    assert two_kernels == {"one": 0, "two": 0}, "nothing was run"


# --- where it counts ----------------------------------------------------------------------------------------------------


def test_decisions_hold_inside_and_nowhere_else(two_kernels: dict[str, int]) -> None:
    plan = plan_of_two()
    for _ in range(3):
        assert by(plan(X)) == "two" and by(plan.model(X)) == "one"
        with plan.inside():
            told = lz.explain("rms_norm", X)
            assert told.chosen == "two.norm" == lz.which("rms_norm", X).kernel_id
            assert told.to_dict()["pinned_by"] == "plan Norm" and by(lz.rms_norm(X)) == "two"
        told = lz.explain("rms_norm", X)
        assert told.chosen == "one.norm" and told.to_dict()["pinned_by"] is None
    assert two_kernels == {"one": 3, "two": 6}


@pytest.mark.usefixtures("two_kernels")
def test_sizes_outside_its_buckets_are_selected_for() -> None:
    plan = plan_of_two(X[None], shape_buckets={"seq_len": [4, 16]})
    ends = {decision.bucket["rows"] for decision in plan.decisions}
    assert ends == {4, 16} and plan.table.shape_buckets["seq_len"] == [4, 16]
    for rows, wanted in ((1, "two"), (4, "two"), (5, "two"), (16, "two"), (17, "one"), (400, "one")):
        x = torch.zeros(1, rows, 8)
        assert by(plan(x), x) == wanted, rows
        assert by(plan.model(x), x) == "one"
    with plan.inside():
        missed = lz.explain("rms_norm", torch.zeros(17, 8)).to_dict()["outside_table"]
    assert missed["code"] == "PLAN_BUCKET_MISS" and "17" in missed["message"]
    assert by(plan(X.double()), X.double()) == "another", "of another dtype"


@pytest.mark.usefixtures("two_kernels")
def test_without_buckets_those_of_the_operation_count() -> None:
    plan = plan_of_two()
    decided = {rows: by(plan(torch.zeros(rows, 8)), torch.zeros(rows, 8)) for rows in (1, 4, 100_000)}
    assert decided == {1: "one", 4: "two", 100_000: "one"}


# --- what stands above it -----------------------------------------------------------------------------------------------


def test_what_is_measured_later_does_not_change_it(tmp_path: Path) -> None:
    given = {"operation": "norm.rms", "platform": "cpu", "supported_dtypes": ["float32"]}

    def right(input: Tensor, eps: float) -> Tensor:
        return input * torch.rsqrt(input.square().mean(-1, keepdim=True) + eps)

    @lz.register_kernel(kernel_id="slow.norm", priority=90, **given)
    def slow(input: Tensor, eps: float) -> Tensor:
        for _ in range(200):
            result = right(input, eps)
        return result

    fresh(perfdb={"path": str(tmp_path / "perfdb.sqlite")})
    try:
        plan = lz.decide(Norm(), X)
        assert plan.decisions[0].kernel_id == "slow.norm"
        with plan.inside():
            assert lz.explain("rms_norm", X).basis == "declared"
        lz.tune(calls=[call.spec for call in lz.calls_of(Norm(), X)], budget="10s")
        outside = lz.explain("rms_norm", X)
        assert outside.basis == "measured" and outside.chosen != "slow.norm"
        with plan.inside():
            inside = lz.explain("rms_norm", X)
        assert inside.chosen == "slow.norm" and inside.to_dict()["pinned_by"] == "plan Norm"
        again = lz.decide(Norm(), X)
        assert again.decisions[0].basis == "measured" and again.decisions[0].kernel_id == outside.chosen
        assert again.decisions[0].time_us and f"{again.decisions[0].time_us:.1f} µs" in str(again)
    finally:
        fresh()
        lz.unregister_kernel("slow.norm")


def rejected(plan: lz.Plan, kernel: str = "two.norm") -> list[str]:
    """Why a kernel does not serve, as told inside the plan."""
    with plan.inside():
        told = lz.explain("rms_norm", X)
    assert told.to_dict()["pinned_by"] is None
    (candidate,) = (candidate for candidate in told.candidates if candidate.kernel_id == kernel)
    return [reason.code for reason in candidate.reasons]


@pytest.mark.usefixtures("two_kernels")
def test_a_denial_wins() -> None:
    plan = plan_of_two()
    assert by(plan(X)) == "two" and plan.mismatches == []
    lz.configure(rules=[{"deny": "two.norm"}])
    assert by(plan(X)) == "one" and rejected(plan) == ["POLICY_DENIED"]
    (mismatch,) = plan.mismatches
    assert mismatch.code == "NOT_VALID" and mismatch.kernel == "two.norm" and "not in force: two.norm" in str(plan)
    lz.configure(rules=None)
    assert by(plan(X)) == "two"
    lz.force_kernel("norm.rms", "one.norm")
    assert by(plan(X)) == "one"
    lz.unforce_kernel("norm.rms")
    with lz.disabled():
        assert by(plan(X)) == "another"
    assert by(plan(X)) == "two"


def test_a_broken_kernel_is_left(two_kernels: dict[str, int]) -> None:
    plan = plan_of_two()
    lz.configure(breaker={"failure_threshold": 2, "timeout_ms": 3_600_000, "max_timeout_ms": 3_600_000})
    two_kernels["broken"] = True
    for _ in range(2):
        assert by(plan(X)) == "one"
    failed = two_kernels["two"]
    assert failed == 2 and rejected(plan) == ["BACKEND_ERROR"]
    for _ in range(3):
        assert by(plan(X)) == "one"
    assert two_kernels["two"] == failed, "its circuit is open"
    two_kernels["broken"] = False
    lz.forget_failures()
    assert by(plan(X)) == "two"


@pytest.mark.usefixtures("two_kernels")
def test_a_kernel_that_cannot_serve_does_not() -> None:
    plan = plan_of_two()
    with lz.deterministic():
        assert by(plan(X)) == "one" and rejected(plan) == ["NON_DETERMINISTIC"]
    assert by(plan(X)) == "two"
    lz.unregister_kernel("two.norm")
    assert by(plan(X)) == "one"
    (mismatch,) = plan.mismatches
    assert mismatch.code == "KERNEL_GONE"


# --- without inputs -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("two_kernels")
def test_without_inputs_it_decides_what_is_called_inside() -> None:
    plan = lz.decide(Norm())
    assert plan.decisions == [] and "nothing is decided" in str(plan)
    lz.rms_norm(X)
    assert plan.decisions == [], "a call outside is none of its own"
    with lz.prefer("two"):
        assert by(plan(X)) == "two"
    assert [decision.kernel_id for decision in plan.decisions] == ["two.norm"]
    assert by(plan(X)) == "two" and by(plan.model(X)) == "one", "decided once"
    x = torch.zeros(4, 16)
    assert by(plan(x), x) == "one"
    with lz.prefer("two"):
        assert by(plan(x), x) == "one", "decided once"
    assert [decision.kernel_id for decision in plan.decisions] == ["two.norm", "one.norm"]
    assert plan.mismatches == [] and "is decided when it is first made inside" in str(plan)


@pytest.mark.usefixtures("two_kernels")
def test_dummy_inputs_are_decided_at_once() -> None:
    model = Norm()
    model.dummy_inputs = {"x": X}  # type: ignore[assignment]
    with lz.prefer("two"):
        plan = lz.decide(model)
    assert [decision.kernel_id for decision in plan.decisions] == ["two.norm"] and by(plan(X)) == "two"
    x = torch.zeros(4, 16)
    assert by(plan(x), x) == "one" and len(plan.decisions) == 2
    with lz.prefer("two"):
        still = lz.decide(model, shape_buckets={"batch": [4]})
    still(x)
    assert len(still.decisions) == 1, "buckets say what is decided"


class Peeking(Norm):
    """What it calls depends on what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        """A norm of as many rows as the first says."""
        return super().forward(x[: int(x[0, 0])])


@pytest.mark.usefixtures("two_kernels")
def test_a_model_that_cannot_be_traced() -> None:
    x = torch.full((4, 8), 3.0)
    with pytest.raises(lz.UntraceableModelError, match="Peeking|int"):
        lz.decide(Peeking(), x)
    model = Peeking()
    model.example_inputs = (x,)  # type: ignore[assignment]
    plan = lz.decide(model)
    assert "dummy inputs were not followed" in str(plan) and plan.decisions == []
    with lz.prefer("two"):
        assert by(plan(x), x[:3]) == "two"
    assert by(plan(x), x[:3]) == "two" and by(model(x), x[:3]) == "one"


def test_calls_of_torch_stay_torchs() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    with torch.no_grad():
        plan = lz.decide(model, X)
        assert torch.equal(plan(X), model(X))
    assert plan.decisions == []
    names = {f"torch.nn.functional.{name}" for name in ("layer_norm", "linear", "gelu")}
    assert plan.torch_calls.keys() == names and plan.torch_calls["torch.nn.functional.linear"] == 2
    assert "torch.nn.functional.linear is called 2 times and stays torch's" in str(plan)
    with torch.no_grad():
        bucketed = lz.decide(model, X, shape_buckets={"batch": [4, 8]})
    assert bucketed.torch_calls == plan.torch_calls, "by one pass of the model"


# --- kept ---------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("two_kernels")
def test_a_saved_plan_is_the_same_plan(tmp_path: Path) -> None:
    plan = plan_of_two(X[None], shape_buckets={"seq_len": [4, 16]})
    path = plan.save(tmp_path / "plan.json")
    again = lz.Plan.load(path, Norm())
    assert again.decisions == plan.decisions and again.mismatches == []
    assert by(again(X)) == "two" and by(again.model(X)) == "one" and again.table.to_dict() == plan.table.to_dict()
    # It is a table like any other.
    assert lz.load_table(path) == []
    try:
        assert by(lz.rms_norm(X)) == "two"
    finally:
        lz.release_pins()
    assert by(lz.rms_norm(X)) == "one"


@pytest.mark.usefixtures("two_kernels")
def test_what_cannot_be_kept_is_told(tmp_path: Path) -> None:
    path = plan_of_two().save(tmp_path / "plan.json")
    data = json.loads(path.read_text())

    def changed(**changes: Any) -> Path:
        path.write_text(json.dumps({**data, **changes}))
        return path

    with pytest.raises(lz.ConfigurationError, match="was decided for cuda_sm90_cu130") as refused:
        lz.Plan.load(changed(hardware_signature="cuda_sm90_cu130"), Norm())
    assert refused.value.code == "DISPATCH_TABLE_REFUSED"
    with pytest.raises(lz.ConfigurationError, match="capabilities of torch are not those"):
        lz.Plan.load(changed(capabilities={"torch": "0" * 64}), Norm())
    entry = data["plans"][0]["ops"][0]
    others = [{**entry, "kernel_id": "three.norm"}, {**entry, "version": "9.9"}]
    for other, code in zip(others, ("KERNEL_GONE", "VERSION_CHANGED"), strict=True):
        plan = lz.Plan.load(changed(plans=[{**data["plans"][0], "ops": [other]}]), Norm())
        (mismatch,) = plan.mismatches
        assert (mismatch.code, mismatch.entry) == (code, "plans[0].ops[0]")
        assert by(plan(X)) == "one" and mismatch.message in str(plan)


@pytest.mark.parametrize("text", ["", "{}", "[]", "none", '{"model_id": "m"}', '{"model_id": "m", "plans": 3}'])
def test_a_file_that_is_no_plan(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(lz.ConfigurationError) as refused:
        lz.Plan.load(tmp_path / "plan.json", Norm())
    assert refused.value.code == "BAD_TABLE" and refused.value.hint
    with pytest.raises(lz.ConfigurationError) as missing:
        lz.Plan.load(tmp_path / "none.json", Norm())
    assert missing.value.code == "UNREADABLE_FILE"


# --- what is wrong is said ------------------------------------------------------------------------------------------------


def test_what_cannot_be_compiled() -> None:
    with pytest.raises(lz.InvalidCallError, match="str cannot be called") as wrong:
        lz.decide("llama-3-8b")
    assert wrong.value.code == "NOT_A_MODEL"
    with pytest.raises(lz.InvalidCallError) as without:
        lz.decide(Norm(), shape_buckets={"seq_len": [8]})
    assert without.value.code == "NO_EXAMPLE_INPUTS"
    for buckets in ({}, {"heads": [8]}):
        with pytest.raises(lz.ConfigurationError) as odd:
            lz.decide(Norm(), X, shape_buckets=buckets)
        assert odd.value.code == "BAD_BUCKETS"
