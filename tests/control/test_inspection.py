"""Which kernel, why, and what is there: every answer is complete, says the same as the others, and comes true."""

from __future__ import annotations

import inspect
import io
import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any
from xml.etree import ElementTree

import layerzero as lz
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layerzero.printing import visible
from torch._subclasses import FakeTensorMode
from torch_cases import CASES, EVERY_FUNCTION, IDS, Case, assert_right, expected, run

every_case = pytest.mark.parametrize("case", CASES, ids=IDS)
every_function = pytest.mark.parametrize("case", EVERY_FUNCTION, ids=[case.function for case in EVERY_FUNCTION])

Q, K = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8)
X = torch.randn(3, 16)


@pytest.fixture
def register() -> Iterator[Callable[..., str]]:
    """Registers kernels that are never run, and takes them away again."""
    known: list[str] = []

    def kernel(operation: str, function: Callable[..., Any], **capabilities: Any) -> str:
        name = f"inspected.k{len(known)}"
        given = {"kernel_id": name, "platform": "cpu", "supported_dtypes": ["float32"], **capabilities}
        lz.register_kernel(operation=operation, **given)(function)
        known.append(given["kernel_id"])
        return str(given["kernel_id"])

    yield kernel
    for name in known:
        lz.unregister_kernel(name)


def attend(query: Any, key: Any, value: Any) -> Any:
    """Never called."""
    raise AssertionError


def norm(input: Any, eps: float) -> Any:
    """Never called."""
    raise AssertionError


# --- which and explain agree, and come true ---------------------------------------------------------------------------


@every_case
def test_which_and_explain_say_the_same(case: Case) -> None:
    args, kwargs = case.make(5)
    chosen, report = lz.which(case.function, *args, **kwargs), lz.explain(case.function, *args, **kwargs)
    first = report.candidates[0]
    assert set(chosen.to_dict()) == {"op", "kernel_id", "version", "score"}
    assert (chosen.op, chosen.kernel_id) == (report.op, report.chosen)
    assert (first.kernel_id, first.version, first.score, first.rank) == (*list(chosen.to_dict().values())[1:], 1)
    assert first.accepted and first.reasons == []
    assert report.basis in ("measured", "predicted", "declared", "locked")


@every_case
def test_every_candidate_is_a_registered_kernel_with_a_rank_or_reasons(case: Case) -> None:
    args, kwargs = case.make(5)
    report = lz.explain(case.function, *args, **kwargs)
    accepted = [c for c in report.candidates if c.accepted]
    refused = [c for c in report.candidates if not c.accepted]
    assert report.candidates == accepted + refused
    assert [c.rank for c in accepted] == list(range(1, len(accepted) + 1))
    if all(c.time_us is None for c in accepted):
        # Otherwise times decide: those that come along with the package, and what another test has measured.
        assert [c.score for c in accepted] == sorted((c.score or 0.0 for c in accepted), reverse=True)
    for candidate in accepted:
        assert candidate.score == pytest.approx(sum((candidate.terms or {}).values()))
        assert candidate.reasons == []
    for candidate in refused:
        assert candidate.reasons and candidate.rank is None and candidate.score is None
    of_the_operation = {(k.kernel_id, k.version) for k in lz.list_kernels(report.op)}
    left_out = of_the_operation - {(c.kernel_id, c.version) for c in report.candidates}
    assert len(of_the_operation) == len(report.candidates) + len(left_out)
    # Kernels for calls with sinks are not told of in calls without.
    assert all("sinks" in kernel_id for kernel_id, _ in left_out), left_out


@every_case
def test_accepted_candidates_run_and_the_others_say_why_not(case: Case) -> None:
    args, kwargs = case.make(5)
    for candidate in lz.explain(case.function, *args, **kwargs).candidates:
        name = candidate.kernel_id
        assert lz.validate(name, *args, **kwargs) == (candidate.accepted, candidate.reasons)
        if candidate.accepted:
            got = run(case, lambda *a, name=name, **k: lz.run_kernel(name, *a, **k))
            assert_right(got, expected(case))
            continue
        with pytest.raises(lz.NoKernelFoundError) as caught:
            lz.run_kernel(name, *args, **kwargs)
        assert caught.value.failures == {name: candidate.reasons}
        assert all(str(reason) in str(caught.value) for reason in candidate.reasons)


@every_function
def test_an_operation_is_known_by_all_of_its_names(case: Case) -> None:
    args, kwargs = case.make(5)
    chosen = lz.which(case.function, *args, **kwargs)
    (operation,) = (o for o in lz.ops() if o.function == case.function)
    assert chosen.op in operation.ops
    for name in (operation.target, chosen.op):
        assert lz.which(name, *args, **kwargs) == chosen


@pytest.mark.parametrize("name", ["attention.causal", "attention.full", "attention"])
def test_an_alias_may_say_what_a_parameter_is(name: str) -> None:
    report = lz.explain(name, Q, K, K)
    assert report.op == "attention.gqa.prefill"
    (ours,) = (c for c in report.candidates if c.kernel_id == "torch.sdpa.math")
    assert ours.accepted
    with pytest.raises(lz.ArgumentTypeError, match="causal"):
        lz.which("attention.full", Q, K, K, causal=True)


def test_the_operation_follows_from_the_arguments() -> None:
    one, equal = torch.randn(2, 1, 4, 8), torch.randn(2, 6, 4, 8)
    assert lz.which("attention", Q, K, K).op == "attention.gqa.prefill"
    assert lz.which("attention", equal, equal, equal).op == "attention.standard.prefill"
    assert lz.which("attention", one, K, K).op == "attention.gqa.decode"
    assert lz.which("attention", one, equal, equal).op == "attention.standard.decode"


# --- what stands for a tensor -----------------------------------------------------------------------------------------


def replaced(case: Case, stand_in: Callable[[torch.Tensor], Any]) -> tuple[list[Any], dict[str, Any]]:
    """The call with something else for each of its tensors."""

    def other(value: Any) -> Any:
        return stand_in(value) if isinstance(value, torch.Tensor) else value

    args, kwargs = case.make(5)
    return [other(a) for a in args], {name: other(value) for name, value in kwargs.items()}


def spec(tensor: torch.Tensor) -> lz.TensorSpec:
    """A description of the tensor."""
    return lz.TensorSpec(tuple(tensor.shape), tensor.dtype, str(tensor.device))


STAND_INS: dict[str, Callable[[torch.Tensor], Any]] = {
    "described": spec,
    "named": lambda t: lz.TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")),
    "numpy": lambda t: t.numpy(),
    "meta": lambda t: t.to("meta"),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
}


@pytest.mark.parametrize("kind", STAND_INS)
@every_case
def test_whatever_stands_for_a_tensor_gets_its_answer(case: Case, kind: str) -> None:
    args, kwargs = case.make(5)
    wanted = lz.which(case.function, *args, **kwargs)
    args, kwargs = replaced(case, STAND_INS[kind])
    assert lz.which(case.function, *args, **kwargs) == wanted
    report = lz.explain(case.function, *args, **kwargs)
    assert report.chosen == wanted.kernel_id
    assert lz.validate(wanted.kernel_id, *args, **kwargs) == (True, [])


@every_case
def test_fake_tensors_get_their_answer_and_nothing_is_printed(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    args, kwargs = case.make(5)
    wanted = lz.which(case.function, *args, **kwargs)
    mode = FakeTensorMode()
    args, kwargs = replaced(case, mode.from_tensor)
    assert lz.which(case.function, *args, **kwargs) == wanted
    with mode:
        assert lz.which(case.function, *args, **kwargs) == wanted
    assert capfd.readouterr().err == ""


def test_any_dlpack_producer_gets_its_answer() -> None:
    class Producer:
        """Nothing but the protocol."""

        def __dlpack__(self, **options: Any) -> Any:
            return X.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return X.__dlpack_device__()

    assert lz.which("rms_norm", Producer()) == lz.which("rms_norm", X)


def test_a_description_is_not_a_tensor() -> None:
    for call in (lz.rms_norm, lambda x: lz.run_kernel("torch.rms_norm", x)):
        with pytest.raises(lz.ArgumentTypeError, match="TensorSpec") as caught:
            call(lz.TensorSpec((2, 4)))
        assert caught.value.code == "NOT_A_TENSOR"


def test_what_is_asked_about_is_not_touched() -> None:
    before = X.clone()
    for question in (lz.which, lz.explain):
        question("rms_norm", X, out=X)
    assert torch.equal(X, before)


# --- reports ----------------------------------------------------------------------------------------------------------


def test_a_report_is_data() -> None:
    report = lz.explain("attention", Q, K, K, softcap=2.0)
    data = report.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["op"] == report.op and data["chosen"] == report.chosen
    assert [c["kernel_id"] for c in data["candidates"]] == [c.kernel_id for c in report.candidates]
    (refused,) = (c for c in data["candidates"] if c["kernel_id"] == "torch.sdpa.math")
    assert refused["reasons"] == [
        {
            "code": "PARAM_UNSUPPORTED",
            "message": "softcap is 2, the kernel takes 0",
            "param": "softcap",
            "found": "2",
            "supported": "0",
        }
    ]
    data["candidates"].clear()
    assert report.to_dict()["candidates"] and repr(report) == str(report)


def test_a_report_prints_as_a_table() -> None:
    report = lz.explain("attention", Q, K, K, softcap=2.0)
    lines = str(report).splitlines()
    assert lines[0] == f"{report.op} on {report.device}"
    assert any(line.split()[:2] == ["chosen", report.chosen] for line in lines)
    head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["kernel", "version"])
    # Many kernels for other hardware are counted, not named.
    elsewhere = [c for c in report.candidates if c.reasons and c.reasons[0].code == "PLATFORM_MISMATCH"]
    assert len(elsewhere) > 3 and lines.pop() == f" ✗  {len(elsewhere)} kernels for other hardware"
    named = [c for c in report.candidates if c not in elsewhere]
    assert [line.split()[1] for line in lines[head + 1 :]] == [c.kernel_id for c in named]
    for candidate, line in zip(named, lines[head + 1 :], strict=True):
        assert line.split()[0] == str(candidate.rank or "✗")
        assert all(str(reason) in line for reason in candidate.reasons)


def test_a_report_draws_as_html_with_everything_escaped(register: Callable[..., str]) -> None:
    evil = register("norm.rms", norm, kernel_id='in<b>spected.<script>"&', version="<i>1</i>", max_seq_len=None)
    register("norm.rms", norm, dims={"hidden": {"max": 1}})
    report = lz.explain("rms_norm", X)
    table = ElementTree.fromstring(report._repr_html_())
    assert {element.tag for element in table.iter()} == {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    rows = [[cell.text or "" for cell in row] for row in table.findall("tbody/tr")]
    assert [row[1:3] for row in rows] == [[c.kernel_id, c.version] for c in report.candidates]
    assert evil in {row[1] for row in rows}
    for row, candidate in zip(rows, report.candidates, strict=True):
        assert all(str(reason) in row[5] for reason in candidate.reasons)
    caption = table.findtext("caption") or ""
    assert report.op in caption and (report.chosen or "") in caption


# --- reasons ----------------------------------------------------------------------------------------------------------

GRAD = X.clone().requires_grad_()
CODES: list[tuple[str, str, Callable[..., Any], dict[str, Any], tuple[Any, ...], dict[str, Any]]] = [
    ("DTYPE_UNSUPPORTED", "norm.rms", norm, {}, (X.double(),), {}),
    ("INPUT_UNSUPPORTED", "norm.rms", norm, {}, (X, X[0]), {}),
    ("PARAM_UNSUPPORTED", "attention", attend, {}, (Q, Q, Q), {"softcap": 0.5}),
    ("CONSTRAINT_FAILED", "norm.rms", norm, {"dims": {"hidden": {"multiple_of": 5}}}, (X,), {}),
    ("CONSTRAINT_FAILED", "norm.rms", norm, {"conditions": ["rows * hidden < 10"]}, (X,), {}),
    ("AUTOGRAD_UNSUPPORTED", "norm.rms", norm, {}, (GRAD,), {}),
    ("PLATFORM_MISMATCH", "norm.rms", norm, {"platform": "cuda", "min_sm": 80}, (X,), {}),
    ("VERSION_UNSUPPORTED", "norm.rms", norm, {"requires": ["torch>=99"]}, (X,), {}),
    ("INSTRUCTION_SET_MISMATCH", "norm.rms", norm, {"instruction_set": "sve2"}, (X,), {}),
    ("MEMORY_HEADROOM_EXCEEDED", "norm.rms", norm, {"workspace_bytes": "rows * 1000000000000000"}, (X,), {}),
    ("GQA_UNSUPPORTED", "attention", attend, {}, (Q, K, K), {}),
    ("HEAD_DIM_TOO_LARGE", "attention", attend, {"max_head_dim": 4}, (Q, Q, Q), {}),
    ("HEAD_DIM_INVALID", "attention", attend, {"min_head_dim": 16}, (Q, Q, Q), {}),
    ("HEAD_DIM_ALIGNMENT", "attention", attend, {"head_dim_multiple": 3}, (Q, Q, Q), {}),
    ("SEQ_TOO_LONG", "attention", attend, {"max_seq_len": 4}, (Q, Q, Q), {}),
    ("ATTN_MASK_UNSUPPORTED", "attention", attend, {}, (Q, Q, Q), {"causal": False, "attn_mask": torch.ones(6, 6) > 0}),
]


@pytest.mark.parametrize(
    ("code", "operation", "function", "capabilities", "args", "kwargs"),
    CODES,
    ids=[f"{code.lower()}-{i}" for i, (code, *_) in enumerate(CODES)],
)
def test_a_kernel_is_out_for_the_reason_it_gives(
    register: Callable[..., str],
    code: str,
    operation: str,
    function: Callable[..., Any],
    capabilities: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    name = register(operation, function, **capabilities)
    accepted, reasons = lz.validate(name, *args, **kwargs)
    assert not accepted and code in {reason.code for reason in reasons}
    for reason in reasons:
        assert str(reason) == f"[{reason.code}] {reason.message}"
        assert reason.message and not any(word in reason.message for word in ("Some(", "None)", "Str(", "DType"))
        assert reason.to_dict() == {"code": reason.code, "message": reason.message, **reason.fields}
        assert json.loads(json.dumps(reason.to_dict())) == reason.to_dict()
    assert lz.which(operation, *args, **kwargs).kernel_id != name


def test_determinism_is_demanded_and_given() -> None:
    chosen = lz.which("rms_norm", X).kernel_id
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        refused = [c for c in lz.explain("rms_norm", X).candidates if not c.accepted and c.backend != "inspected"]
        assert lz.which("rms_norm", X).kernel_id == chosen
        lz.register_kernel(
            operation="norm.rms", kernel_id="inspected.random", platform="cpu", supported_dtypes=["float32"]
        )(norm)
        _, reasons = lz.validate("inspected.random", X)
        assert [reason.code for reason in reasons] == ["NON_DETERMINISTIC"]
        assert all(reason.code != "NON_DETERMINISTIC" for c in refused for reason in c.reasons)
    finally:
        torch._C._set_deterministic_algorithms(False, warn_only=False)
        lz.unregister_kernel("inspected.random")


# --- what is there ----------------------------------------------------------------------------------------------------


def test_kernels_are_listed_by_any_name_and_together() -> None:
    everything = lz.list_kernels()
    assert len({(k.kernel_id, k.version) for k in everything}) == len(everything)
    of_all = {k.kernel_id for operation in lz.ops() for k in lz.list_kernels(operation.function)}
    assert of_all == {k.kernel_id for k in everything}
    for operation in lz.ops():
        by_op = {k.kernel_id for op in operation.ops for k in lz.list_kernels(op)}
        assert {k.kernel_id for k in lz.list_kernels(operation.target)} == by_op
        # What right means for texts is up to each tokenizer's own library.
        texts = operation.target.startswith("tokenize")
        assert texts or any(k.reference for k in lz.list_kernels(operation.function))
    with pytest.raises(lz.UnknownOperationError, match="attention"):
        lz.list_kernels("atention")


def test_a_kernel_that_cannot_run_here_says_why() -> None:
    absent = [k for k in lz.list_kernels() if not k.available]
    assert {k.backend for k in absent} >= {"cudnn", "zentorch"}
    assert all(k.unavailable or k.dispatch == "described" for k in absent)
    (ours,) = (k for k in lz.list_kernels("norm.rms") if k.kernel_id == "torch.rms_norm")
    assert ours.available and ours.backend == "torch" and ours.platforms == ["cpu"] and "bfloat16" in ours.dtypes


@every_function
def test_every_function_has_a_signature_and_a_whole_docstring(case: Case) -> None:
    (operation,) = (o for o in lz.ops() if o.function == case.function)
    function = getattr(lz, case.function)
    signature = inspect.signature(function)
    assert operation.signature == f"{case.function}{signature}"
    for name in signature.parameters:
        assert f"    {name}: " in operation.doc
    doc = inspect.getdoc(function) or ""
    assert "Args:" in doc and "Returns:" in doc and all(op in doc for op in operation.ops)
    assert function.__name__ == case.function and function.__module__ == "layerzero"
    assert doc.partition("\n")[0].endswith(".") and "schema that fits" not in doc


def test_doctor_prints_what_it_returns() -> None:
    text = io.StringIO()
    found = lz.doctor(file=text)
    assert text.getvalue() == f"{found}\n"
    assert found.layerzero == lz.__version__ and found.devices[0]["platform"] == "cpu"
    by_name = {backend["name"]: backend for backend in found.backends}
    assert by_name["torch"]["version"] == torch.__version__ and by_name["torch"]["unavailable"] is None
    assert by_name["zentorch"]["unavailable"]["code"] == "NOT_INSTALLED"
    assert "zentorch is not installed" in str(found)
    listed = str(found).partition("backends\n")[2].partition("\nunproven ")[0].splitlines()
    usable_first = sorted(found.backends, key=lambda backend: backend["unavailable"] is not None)
    assert [line.split()[1] for line in listed] == [backend["name"] for backend in usable_first]
    assert "each call reads tensors in place, and torch's state from its C functions\n" in str(found)
    kernels = lz.list_kernels()
    assert (found.kernels, found.runnable) == (len(kernels), sum(k.available for k in kernels))
    assert found.status["exchange_api"] is True and found.status["torch_state_by"] == "symbols"


def test_numpy_numbers_are_numbers() -> None:
    assert lz.which("sample_topk", X, np.int64(3)) == lz.which("sample_topk", X, 3)
    assert lz.which("rms_norm", X, eps=np.float32(1e-5)) == lz.which("rms_norm", X, eps=1e-5)


def test_reports_show_control_characters() -> None:
    name = "red \x1b[31m\x07\x9b and\ttab"
    lz.configure(rules=[{"name": name, "deny_sources": ["torch"]}])
    try:
        report = lz.explain("rms_norm", torch.ones(2, 4))
        shown = str(report)
    finally:
        lz.reset()
    assert "red \\x1b[31m\\x07\\x9b and\ttab" in shown
    assert not [c for c in shown if not c.isprintable() and c not in "\n\t"]
    assert any(name in reason.message for c in report.candidates for reason in c.reasons), "data are as they are"


@given(st.text())
def test_every_control_character_is_shown_and_nothing_else_changes(text: str) -> None:
    shown = visible(text)
    assert not [c for c in shown if unicodedata.category(c) == "Cc" and c not in "\n\t"]
    kept = "".join(c for c in text if unicodedata.category(c) != "Cc" or c in "\n\t")
    assert re.sub(r"\\x[0-9a-f]{2}", "", shown) == re.sub(r"\\x[0-9a-f]{2}", "", kept)


def test_a_window_is_called_what_the_caller_calls_it(register: Callable[..., str]) -> None:
    def whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
        return query

    name = register("attention", whole)
    for window, said in ((3, "3 to the left"), ((-1, 2), "2 to the right")):
        _, reasons = lz.validate(name, Q, Q, Q, causal=False, window=window)
        (about,) = [r for r in reasons if r.code == "PARAM_UNSUPPORTED"]
        assert about.message.startswith(f"window is {said}, the kernel takes -1 to the ")


def test_kernels_for_calls_with_an_input_are_not_listed_without_it() -> None:
    q = torch.randn(1, 20, 2, 8)
    listed = {c.kernel_id for c in lz.explain("attention", q, q, q).candidates}
    assert "torch.sdpa.flash" in listed and not any("sinks" in name for name in listed)
    with_sinks = lz.explain("attention", q, q, q, sinks=torch.zeros(2))
    assert "torch.sdpa.flash.sinks" in {c.kernel_id for c in with_sinks.candidates if c.accepted}
    # Who names it is told.
    valid, reasons = lz.validate("torch.sdpa.flash.sinks", q, q, q)
    assert not valid and "'sinks' is given" in str(reasons[0])
