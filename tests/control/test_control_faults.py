"""A bad kernel never breaks a caller: every operation × every way to go wrong.

In each cell the caller gets the right answer, or, where a kernel updates tensors in place and broke off, a typed error
that says so. The table is printed at the end (`pytest -rP`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from faults import plugin
from faults.kinds import BY_NAME, FAULTS, Fault
from faults.states import breaker, events, failures, fresh, last_event
from processes import SUPPORT, forked
from torch import Tensor
from torch_cases import CASES, Case, _made, _paged, as_tuple, assert_right, copied, expected

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")


def _like(id: str, of: str, make: Callable[[int], Any]) -> Case:
    (model,) = (case for case in CASES if case.id == of)
    return Case(id, model.function, make, model.reference, updates=model.updates)


def _paged_standard(randn: Callable[..., Tensor], n: int, prefill: bool) -> Any:
    (_, _, _, tables, lens), options = _paged(randn, n)
    if prefill:
        options = {"cu_seqlens_q": torch.tensor([0, 2, 6], dtype=torch.int32)}
    return (randn(6 if prefill else 2, 4, 8), randn(n, 4, 4, 8), randn(n, 4, 4, 8), tables, lens), options


def _ends(*ends: int) -> Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32)


def _latent_pages(randn: Callable[..., Tensor], n: int) -> Any:
    (_, _, _, tables, lens), _ = _paged(randn, n)
    options = {"block_tables": tables, "context_lens": lens, "qo_indptr": _ends(2, 6)}
    return (randn(6, 4, 16), randn(6, 4, 8), randn(n, 4, 16), randn(n, 4, 8), 0.2), options


BSHD = {"layout": "BSHD"}
# Operations that no call of the shared list is.
MORE = [
    _like("decode", "attention", _made(lambda r, n: ((r(2, 1, 4, 8), r(2, n, 4, 8), r(2, n, 4, 8)), BSHD))),
    _like("decode-gqa", "attention", _made(lambda r, n: ((r(2, 1, 4, 8), r(2, n, 2, 8), r(2, n, 2, 8)), BSHD))),
    _like("decode-cross", "cross_attention", _made(lambda r, n: ((r(2, 1, 4, 8), r(2, n, 4, 8), r(2, n, 4, 8)), BSHD))),
    _like("paged-decode", "paged_attention", _made(lambda r, n: _paged_standard(r, n, prefill=False))),
    _like("paged-prefill", "paged_attention", _made(lambda r, n: _paged_standard(r, n, prefill=True))),
    _like(
        "varlen",
        "varlen_attention",
        _made(lambda r, n: ((r(n, 4, 8), r(n, 4, 8), r(n, 4, 8), _ends(2, n), _ends(2, n)), {})),
    ),
    _like("mla-pages", "mla_attention", _made(lambda r, n: _latent_pages(r, n))),
    _like("mla-decode", "mla_attention", _made(lambda r, n: ((r(1, 4, 16), r(1, 4, 8), r(n, 16), r(n, 8), 0.2), {}))),
]


def operation(case: Case) -> str:
    """The operation a call is."""
    args, kwargs = case.make(5)
    return str(lz.which(case.function, *args, **kwargs).op)


@cache
def sample_calls() -> dict[str, Case]:
    """One call for every operation."""
    found: dict[str, Case] = {}
    for case in (*CASES, *MORE):
        found.setdefault(operation(case), case)
    return found


OPERATIONS = plugin.operations()


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    """The plugin, for the tests of this module."""
    plugin.register()
    yield
    plugin.unregister()
    fresh()


@pytest.fixture
def restored() -> Iterator[None]:
    """Nothing of one test is left for the next."""
    fresh()
    yield
    fresh()


def settle(checked: bool) -> None:
    """Each call is to reach the kernel; what happens when they are many is another test's."""
    in_force = {setting.key: setting.value for setting in lz.settings()}
    if (in_force["breaker.failure_threshold"], in_force["checked"]) != (1000, checked):
        fresh(breaker__failure_threshold=1000, degradation__enabled=False, checked=checked)


def test_every_operation_is_called_and_served_by_the_faulty_kernel() -> None:
    assert set(sample_calls()) == set(OPERATIONS)
    for op, case in sample_calls().items():
        args, kwargs = case.make(5)
        assert lz.which(case.function, *args, **kwargs).kernel_id == plugin.kernel_id(op)


def right_answer(op: str) -> tuple[Tensor, ...]:
    """What the kernel would have to give, by the reference: as it gives it, and not as the function does."""
    case = sample_calls()[op]
    args, kwargs = copied(case.make(5))
    given = lz.run_kernel(f"lz_cpu.ref.{op}", *args, **kwargs)
    answer = tuple(args[at] for at in case.updates) if case.updates else as_tuple(given)
    assert_right(answer, expected(case))
    return answer


def call(case: Case) -> tuple[Tensor, ...]:
    """One call on fresh tensors: its results, and what it updated."""
    args, kwargs = copied(case.make(5))
    result = case.call(*args, **kwargs)
    if case.updates:
        assert result is None
    return (*as_tuple(result), *(args[at] for at in case.updates))


# --- the matrix -------------------------------------------------------------------------------------------------------


@cache
def outcome(op: str, fault: Fault) -> str:
    """What became of the calls of a cell, in a word. Everything else fails."""
    case, right = sample_calls()[op], right_answer(op)
    if fault.checked and not any(t.is_floating_point() for t in right):
        return "no floats"
    settle(fault.checked)
    before, wanted = failures(plugin.kernel_id(op)), expected(case)
    at_times = fault.name.endswith("at_times")
    # Once for the first call of a kind, and several times for those that were seen before.
    wrong = {2, 5} if at_times else {0, 1, 2}
    spoilt = wrong if fault.breaks_off else set()
    with plugin.faulty(fault, right) as calls:
        for n in range(7 if at_times else 3):
            if fault.name == "interrupted":
                with pytest.raises(KeyboardInterrupt):
                    call(case)
            else:
                assert_right(call(case), wanted)
            # It was asked, and asked once; found wrong, it is out.
            asked = min(n, min(wrong)) if fault.checked else n
            assert calls == [op] * (asked + 1)
    failed = failures(plugin.kernel_id(op)) - before
    if fault.checked:
        lz.forget_failures()
        assert failed == 1
        return "reference"
    if fault.name == "interrupted":
        assert failed == 0, "an interrupt is not the kernel's failure"
        return "interrupt"
    if fault.harmless:
        assert failed == 0
        return "slow, right"
    if case.updates:
        # The answer is in the tensors; what else such a kernel returns does not reach the caller.
        assert failed == len(spoilt)
        return "reference" if spoilt else "right"
    assert failed == len(wrong)
    return "reference"


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_bad_kernel_never_breaks_a_caller(op: str, fault: Fault) -> None:
    assert outcome(op, fault)


def test_the_whole_matrix() -> None:
    """Every cell has its outcome; the table is shown."""

    def seen(op: str, fault: Fault) -> str:
        try:
            return outcome(op, fault)
        except (AssertionError, pytest.fail.Exception):
            return "WRONG"

    cells = {(op, fault.name): seen(op, fault) for fault in FAULTS for op in OPERATIONS}
    print(table(cells))
    counted = {word: sum(found == word for found in cells.values()) for word in sorted(set(cells.values()))}
    print(f"{len(cells)} cells:", ", ".join(f"{count} {word}" for word, count in counted.items()))
    assert "WRONG" not in counted
    tried = [word for word in cells.values() if word != "no floats"]
    assert len(tried) >= 150 and set(tried) == {"reference", "right", "slow, right", "interrupt"}


def table(cells: dict[tuple[str, str], str]) -> str:
    """Operations down, faults across, by number."""
    legend = [f"{i + 1:>3}  {fault.name}" for i, fault in enumerate(FAULTS)]
    marks = {
        "reference": "ref",
        "right": "ok",
        "slow, right": "ok",
        "interrupt": "int",
        "no floats": "-",
        "WRONG": "!!!",
    }
    width = max(map(len, OPERATIONS))
    lines = ["", "what the caller got, by operation and fault", *legend]
    lines.append("     ref the reference's answer   ok the kernel's answer, which was right")
    lines.append("     int the interrupt   - nothing that could be NaN")
    lines.append(f"{'':<{width}}" + "".join(f"{i + 1:>4}" for i in range(len(FAULTS))))
    for op in OPERATIONS:
        lines.append(f"{op:<{width}}" + "".join(f"{marks[cells[op, fault.name]]:>4}" for fault in FAULTS))
    return "\n".join(lines)


# --- many calls, as they come -----------------------------------------------------------------------------------------

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)


def normed(x: Tensor = X) -> Tensor:
    """What rms_norm gives."""
    return (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def is_right(result: Any) -> bool:
    """Whether it is that."""
    return bool(torch.allclose(torch.as_tensor(result), normed(), rtol=1e-5, atol=1e-5))


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("op", OPERATIONS)
def test_with_the_usual_settings_a_kernel_that_keeps_failing_is_left_alone(op: str) -> None:
    """Forty calls: five reach the kernel, and every one is answered; the level goes down, and that changes no answer."""
    case, right = sample_calls()[op], right_answer(op)
    with plugin.faulty(BY_NAME["raises"], right) as calls:
        for _ in range(40):
            assert_right(call(case), expected(case))
        assert calls == [op] * 5
    assert breaker(plugin.BACKEND, op)["state"] == "open"


@pytest.mark.usefixtures("restored")
def test_five_failures_in_a_row_open_the_breaker_and_four_do_not() -> None:
    since = last_event()
    for fault, wanted in (("raises", 4), ("slow", 1), ("raises", 4), ("slow", 1), ("raises", 5)):
        with plugin.faulty(BY_NAME[fault], (normed(),)) as calls:
            for _ in range(wanted):
                assert is_right(lz.rms_norm(X))
            assert len(calls) == wanted
        # A call that goes well is heard of when it is looked at; a kernel in doubt is looked at every time.
        opened = [e for e in events(since) if e["event"] == "breaker_opened"]
        assert len(opened) == (wanted == 5)
    assert opened[0]["backend"] == plugin.BACKEND and "broken on purpose" in opened[0]["error"]


@pytest.mark.usefixtures("restored")
def test_an_open_breaker_is_seen_everywhere() -> None:
    with plugin.faulty(BY_NAME["raises"], (normed(),)) as calls:
        for _ in range(9):
            assert is_right(lz.rms_norm(X))
        assert len(calls) == 5
    health = lz.health()
    assert not health.well and breaker(plugin.BACKEND, "norm.rms")["state"] == "open"
    assert breaker(plugin.BACKEND, "norm.rms")["last_error"]["message"] == "RuntimeError: broken on purpose"
    assert health.kernels["lz_faults.norm.rms"]["last_error"]["message"] == "RuntimeError: broken on purpose"
    assert "circuit of lz_faults.norm.rms for norm.rms is open: RuntimeError: broken on purpose" in str(health)
    report = lz.explain("rms_norm", X)
    (reason,) = next(c.reasons for c in report.candidates if c.kernel_id == "lz_faults.norm.rms")
    assert reason.code == "BACKEND_ERROR" and "circuit of lz_faults.norm.rms is open" in reason.message
    assert report.chosen == lz.which("rms_norm", X).kernel_id == "torch.rms_norm"
    # Another operation of the library is another matter.
    assert lz.which("gelu", X).kernel_id == "lz_faults.activation.gelu"


@pytest.mark.usefixtures("restored")
def test_a_library_that_works_again_comes_back_by_three_probes() -> None:
    fresh(breaker={"timeout_ms": 1, "failure_threshold": 2}, degradation__enabled=False)
    since = last_event()
    with plugin.faulty(BY_NAME["raises"], (normed(),)) as calls:
        while len(calls) < 4:
            assert is_right(lz.rms_norm(X))
    # Two failures, and then a probe each time.
    assert [e["openings"] for e in events(since) if e["event"] == "breaker_opened"] == [1, 2, 3]
    with plugin.faulty(BY_NAME["slow"], (normed(),)) as calls:
        while breaker(plugin.BACKEND, "norm.rms")["state"] != "closed":
            assert is_right(lz.rms_norm(X))
        assert len(calls) == 3
        assert is_right(lz.rms_norm(X)) and len(calls) == 4
    names = [e["event"] for e in events(since) if e["event"].startswith("breaker_")]
    assert names == ["breaker_opened"] + ["breaker_half_open", "breaker_opened"] * 2 + [
        "breaker_half_open",
        "breaker_closed",
    ]


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("fault", ["no_memory", "no_device_memory"])
def test_memory_that_ran_out_is_nobodys_failure(fault: str) -> None:
    since = last_event()
    with plugin.faulty(BY_NAME[fault], (normed(),)) as calls:
        for _ in range(8):
            assert is_right(lz.rms_norm(X))
        assert len(calls) == 8
    assert breaker(plugin.BACKEND, "norm.rms")["state"] == "closed"
    assert sum(e["event"] == "out_of_memory" for e in events(since)) == 8


@pytest.mark.usefixtures("restored")
def test_after_memory_ran_out_the_next_is_the_kernel_that_needs_the_least() -> None:
    ran: list[str] = []

    def kernel(name: str, priority: int, workspace: str) -> None:
        def run(input: Tensor, eps: float) -> Tensor:
            ran.append(name)
            raise MemoryError(f"Unable to allocate {workspace}")

        lz.register_kernel(
            operation="norm.rms",
            kernel_id=f"{name}.norm",
            platform="cpu",
            supported_dtypes=["float32"],
            priority=priority,
            workspace_bytes=workspace,
        )(run)

    kernel("greedy", 99, "rows * 4096")
    kernel("modest", 98, "rows * 64")
    try:
        fresh(rules=[{"deny_sources": ["lz_faults"]}])
        assert is_right(lz.rms_norm(X))
        assert ran[0] == "greedy" and "modest" not in ran, "torch's kernels say they need nothing"
    finally:
        lz.unregister_kernel("greedy.norm")
        lz.unregister_kernel("modest.norm")


STICKY = """
    import sys
    sys.path.insert(0, {tests!r})
    import logging
    logging.getLogger("layerzero").addHandler(logging.NullHandler())
    import torch, warnings
    warnings.simplefilter("ignore")
    import layerzero as lz
    from faults import plugin
    from faults.kinds import Fault, ILLEGAL_ACCESS, _raise
    from faults.states import breaker, events, fresh

    if {register}:
        plugin.register()
    x = torch.randn(4, 8)
    right = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    poisoned = Fault("poisoned", _raise(lambda: RuntimeError(ILLEGAL_ACCESS)))
    with plugin.faulty(poisoned, (right,)) as calls:
        rights = [torch.allclose(lz.rms_norm(x), right, atol=1e-6) for _ in range(4)]
        made = len(calls)
        before = breaker("lz_faults", "norm.rms")
        fresh(breaker__failure_threshold=3)
        rights += [torch.allclose(lz.rms_norm(x), right, atol=1e-6) for _ in range(4)]
        lz.gelu(x)
        reasons = [r.code + ": " + r.message for c in lz.explain("gelu", x).candidates for r in c.reasons
                   if c.backend == "lz_faults"]
        answer({{
            "rights": rights, "made": made, "later": len(calls), "before": before,
            "after": breaker("lz_faults", "norm.rms"), "reasons": reasons, "well": lz.health().well,
            "events": [e["event"] for e in events()],
        }})
"""


@pytest.mark.parametrize("by", ["code", "entry point"])
def test_a_lost_device_puts_the_library_out_for_the_life_of_the_process(by: str, tmp_path: Path) -> None:
    """Also as an installed plugin, found by its entry point."""
    if by == "entry point":
        metadata = tmp_path / "lz_faults-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lz_faults\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[layerzero.backends]\nlz_faults = faults.plugin:register\n")
    code = textwrap.dedent(STICKY).format(tests=str(SUPPORT), register=by == "code")
    found = forked(code, path=[tmp_path, SUPPORT])
    assert found["rights"] == [True] * 8 and found["made"] == found["later"] == 1
    for seen in (found["before"], found["after"]):
        assert seen["state"] == "disabled" and "illegal memory access" in seen["sticky"]
    assert len(found["reasons"]) == 1 and "BACKEND_ERROR" in found["reasons"][0]
    assert not found["well"] and found["events"].count("backend_disabled") == 1


# --- when nothing may follow ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("fault", [f for f in FAULTS if not f.harmless and not f.checked], ids=lambda fault: fault.name)
def test_without_fallback_the_error_is_the_callers(fault: Fault) -> None:
    fresh(fallback_enabled=False, breaker__enabled=False)
    out = torch.zeros_like(X)
    with plugin.faulty(fault, (normed(),)) as calls:
        if fault.name.endswith("at_times"):
            assert is_right(lz.rms_norm(X)) and is_right(lz.rms_norm(X))
        if fault.name == "interrupted":
            with pytest.raises(KeyboardInterrupt):
                lz.rms_norm(X)
            return
        with pytest.raises(lz.KernelExecutionError) as caught:
            lz.rms_norm(X)
        if not fault.name.endswith("at_times"):
            with pytest.raises(lz.KernelExecutionError):
                lz.rms_norm(X, out=out)
            assert not out.any(), "what is given to write to is left alone"
    assert calls
    error = caught.value
    assert error.operation == "norm.rms" and "fallback is disabled" in error.hint
    assert list(error.failures) == ["lz_faults.norm.rms"]
    assert error.__cause__ is error.failures["lz_faults.norm.rms"]
    assert error.to_dict()["failures"]["lz_faults.norm.rms"].startswith(type(error.__cause__).__name__)


@pytest.mark.usefixtures("restored")
def test_the_error_holds_the_whole_chain() -> None:
    """Three kernels, all of them broken, and nothing else may run."""

    def second(input: Tensor, eps: float) -> Tensor:
        raise ValueError("neither does this")

    def third(input: Tensor, eps: float) -> Any:
        return "nor this"

    given = {"operation": "norm.rms", "platform": "cpu", "supported_dtypes": ["float32"]}
    lz.register_kernel(kernel_id="second.norm", priority=90, **given)(second)
    lz.register_kernel(kernel_id="third.norm", priority=80, **given)(third)
    try:
        fresh(rules=[{"deny_sources": ["torch", "lz_cpu"]}], breaker__failure_threshold=2)
        with plugin.faulty(BY_NAME["raises"], ()):
            for n in range(4):
                with pytest.raises(lz.KernelExecutionError) as caught:
                    lz.rms_norm(X)
                failures = caught.value.failures
                assert list(failures) == ["lz_faults.norm.rms", "second.norm", "third.norm"]
                if n < 2:
                    assert [type(e) for e in failures.values()] == [RuntimeError, ValueError, TypeError]
                    assert "the kernel gave a str, expected a tensor" in str(failures["third.norm"])
                else:
                    # Not tried any more, and the error says so of each.
                    assert all("is open" in str(e) for e in failures.values())
                assert all(kernel in str(caught.value) for kernel in failures)
    finally:
        lz.unregister_kernel("second.norm")
        lz.unregister_kernel("third.norm")


# --- through every door -----------------------------------------------------------------------------------------------

DOORS: dict[str, Callable[[], Any]] = {
    "function": lambda: lz.rms_norm(X),
    "keywords": lambda: lz.rms_norm(input=X, weight=None, eps=1e-6),
    "out": lambda: lz.rms_norm(X, out=torch.empty_like(X)),
    "numpy": lambda: lz.rms_norm(X.numpy()),
    "operator": lambda: torch.ops.layerzero.rms_norm(X),
    "inference": lambda: torch.inference_mode()(lz.rms_norm)(X),
    "vmap": lambda: torch.vmap(lz.rms_norm)(X),
    "compiled": lambda: torch.compile(lambda x: lz.rms_norm(x), fullgraph=True, backend="aot_eager")(X),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16)(lz.rms_norm)(X),
}


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("fault", ["raises", "raises_at_times", "wrong_shape_at_times", "returns_none"])
def test_whichever_way_a_call_comes_in(door: str, fault: str) -> None:
    fresh(breaker__enabled=False, degradation__enabled=False)
    with plugin.faulty(BY_NAME[fault], (normed(),)) as calls:
        for _ in range(4):
            assert is_right(DOORS[door]())
        assert len(calls) >= 3


@pytest.mark.usefixtures("restored")
def test_gradients_come_from_the_kernel_that_served() -> None:
    def kernel(input: Tensor, eps: float) -> Tensor:
        raise RuntimeError("no")

    lz.register_kernel(
        operation="norm.rms",
        kernel_id="untrained.norm",
        platform="cpu",
        supported_dtypes=["float32"],
        priority=99,
        autograd=True,
    )(kernel)
    try:
        x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
        for _ in range(3):
            lz.rms_norm(x).square().sum().backward()
            torch.nn.functional.rms_norm(y, (8,), eps=1e-6).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        assert failures("untrained.norm") == 3
    finally:
        lz.unregister_kernel("untrained.norm")


@pytest.mark.usefixtures("restored")
def test_a_wrong_call_stays_the_callers_fault() -> None:
    """It is not put to one kernel after the other, and no kernel is blamed."""
    before = failures("lz_faults.norm.rms")
    with plugin.faulty(BY_NAME["slow"], (normed(),)) as calls:
        for _ in range(7):
            with pytest.raises(lz.InvalidCallError):
                lz.rms_norm(X, torch.ones(3))
    assert not calls and failures("lz_faults.norm.rms") == before
    assert lz.health().level == "full"
