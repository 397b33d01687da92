"""Runs a case through the public function and every kernel that takes it, and holds each result to the contract."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

# What was measured, compiled or called on this machine before is none of the tests' business.
os.environ["HOME"] = tempfile.mkdtemp(prefix="layerzero-tests-")
for _name in ("XDG_STATE_HOME", "LAYERZERO_PERFDB_PATH", "LAYERZERO_CONFIG"):
    os.environ.pop(_name, None)
# Many tests register kernels that tell by a wrong result who served a call. Comparing kernels with the reference has tests
# of its own, which turn it on (test_proof.py).
os.environ["LAYERZERO_VERIFY"] = "off"
# What was measured on other machines is for tests/tuning/test_priors.py: the others see the declared order, the same on every CPU.
os.environ["LAYERZERO_PERFDB_PRIORS"] = "false"

import layerzero as lz
import numpy as np
import pytest
import told_apart
import torch
from faults import states
from hypothesis import HealthCheck, configuration, settings
from layerzero import _native
from levels import broken  # noqa: F401
from strategies import LEAST_CASES, Array, Stored, array, filled

configuration.set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "layerzero-hypothesis")
settings.register_profile(
    "layerzero",
    deadline=None,
    database=None,
    print_blob=True,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("layerzero")
# The tensors are tiny: waiting for a second thread would cost more than all the work.
torch.set_num_threads(1)

# Spec 000 §3.2, and what the schemas add for the other dtypes: relative and absolute.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 1e-2,
    torch.float8_e4m3fn: 0.125,
    torch.float8_e5m2: 0.25,
}


@dataclass(frozen=True)
class Function:
    """A public function: the operations it stands for, and its arguments by position."""

    operation: str
    positional: tuple[str, ...]
    out: bool = True


#: Files that take longest. They go first, so that no worker begins one when the others are done.
LONG = (
    "test_backend_torch_cuda",
    "test_docs",
    "test_compat",
    "test_interruptions",
    "test_backend_flash_attn",
    "test_control_faults",
    "test_tuning",
    "test_backend_rocm",
    "test_torch_compile",
    "test_isa",
    "test_compile_lowering",
    "test_adapters",
    "test_correct_attention",
    "test_backend_triton_decode",
    "test_backend_flashinfer_attention",
    "test_warm_up",
    "test_tuned_before",
    "test_loading",
    "test_exits",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how long the tests of each folder took, all workers together."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[Path(report.nodeid.partition("::")[0]).parent.name] += report.duration
    if len(seconds) > 1:
        listed = ", ".join(f"{folder} {spent:.0f} s" for folder, spent in seconds.most_common())
        terminalreporter.write_line(f"time by folder: {listed}")


@pytest.fixture(autouse=True, scope="module")
def nothing_learned(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the tests of another file have measured is forgotten: a kernel with times goes before one without."""
    lz.configure(perfdb={"path": str(tmp_path_factory.mktemp("none") / "none" / "perfdb.sqlite")})
    _native.learn()
    lz.reset()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What failed in one test is not held against the kernels of the next."""
    yield
    lz.forget_failures()


@pytest.fixture
def nothing_measured() -> Iterator[None]:
    """Nothing is known of times. One call in 64 is held against what was measured, and the first of a kind allocates for that."""
    lz.configure(perfdb__enabled=False)
    yield
    lz.configure(perfdb__enabled=None)


@pytest.fixture
def restored() -> Iterator[None]:
    """The files and the environment of the tests themselves, and nothing said by code."""
    states.fresh()
    yield
    _native.load_sources()
    states.fresh()


@pytest.fixture
def two_kernels() -> Iterator[None]:
    """Kernels that tell who serves a call, and nothing configured."""
    told_apart.register()
    states.fresh()
    yield
    states.fresh()
    told_apart.unregister()


QKV = ("query", "key", "value")
FUNCTIONS = {
    "attention": Function("attention", (*QKV, "causal", "scale")),
    "cross_attention": Function("attention.cross", (*QKV, "scale")),
    "varlen_attention": Function(
        "attention.varlen", (*QKV, "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    ),
    "paged_attention": Function(
        "attention.paged", ("query", "key_cache", "value_cache", "block_tables", "context_lens", "scale")
    ),
    "attention_lse": Function("attention.lse", (*QKV, "causal", "scale"), out=False),
    "varlen_attention_lse": Function(
        "attention.lse.varlen", (*QKV, "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), out=False
    ),
    "paged_attention_lse": Function(
        "attention.lse.paged",
        ("query", "key_cache", "value_cache", "block_tables", "context_lens", "scale"),
        out=False,
    ),
    "merge_states": Function("attention.merge", ("out_a", "lse_a", "out_b", "lse_b"), out=False),
    "mla_attention": Function("attention.mla", ("q_nope", "q_pe", "ckv", "kpe", "scale")),
    "sparse_attention": Function("attention.sparse", QKV),
    "embedding": Function("embedding", ("indices", "weight")),
    "rope": Function("rope", ("input", "cos", "sin", "interleaved")),
    "alibi_bias": Function("alibi_bias", ("slopes", "seq_q", "seq_k")),
    "rms_norm": Function("rms_norm", ("input", "weight", "eps")),
    "layer_norm": Function("layer_norm", ("input", "normalized_shape", "weight", "bias", "eps")),
    "fused_add_rms_norm": Function("fused_add_rms_norm", ("input", "residual", "weight", "eps"), out=False),
    "linear": Function("linear", ("input", "weight", "bias")),
    "linear_packed": Function("linear_packed", ("input", "weight", "bias")),
    "linear_quantized": Function("linear_quantized", ("input", "weight", "bias")),
    "fused_mlp": Function("fused_mlp", ("input", "up_weight", "down_weight", "gate_weight", "activation")),
    "silu_mul": Function("silu_mul", ("gate", "up")),
    "gelu": Function("gelu", ("input", "approximate")),
    "softmax": Function("softmax", ("input",)),
    "sample_topk": Function("sample_topk", ("logits", "k")),
    "sample_topp": Function("sample_topp", ("logits", "p")),
    "speculative_verify": Function("speculative_verify", ("draft_ids", "draft_probs", "target_probs"), out=False),
    "quantize": Function("quantize", ("input", "dtype", "scale"), out=False),
    "dequantize": Function("dequantize", ("values", "scales", "zero_points"), out=False),
    "kv_append": Function("kv_append", ("key", "value", "key_cache", "value_cache", "slot_mapping"), out=False),
    "kv_compact": Function("kv_compact", ("key_cache", "value_cache", "moves"), out=False),
}


@dataclass(frozen=True)
class Expected:
    """One output: its float64 values, its dtype, how many roundoffs of the arithmetic (float32 for all dtypes but
    float64) it may be off beyond the tolerance, and where it may be NaN all the same."""

    values: Array
    dtype: torch.dtype
    growth: Array | float = 0.0
    may_be_nan: Array | bool = False
    exact: bool = False
    decode: Callable[[torch.Tensor], Array] | None = None
    #: The dtype whose tolerance it has, where that is not its own: the first input's, as the engine has it.
    like: torch.dtype | None = None


def difference(got: torch.Tensor, want: Expected) -> str | None:
    """What is wrong with a result, if anything."""
    if not isinstance(got, torch.Tensor):
        return f"is a {type(got).__name__}, not a tensor"
    if got.dtype != want.dtype or got.device.type != "cpu":
        return f"is {got.dtype} on {got.device}, not {want.dtype}"
    values = (want.decode or array)(got).astype(np.float64)
    if values.shape != want.values.shape:
        return f"has shape {tuple(got.shape)}, not that of {want.values.shape}"
    with np.errstate(invalid="ignore"):
        if want.exact:
            wrong = ~((values == want.values) | (np.isnan(values) & np.isnan(want.values)))
        else:
            tolerance = TOLERANCE[want.like or want.dtype]
            unit = 2.0**-53 if want.dtype == torch.float64 else 2.0**-24
            growth = np.nan_to_num(want.growth, nan=0.0, posinf=0.0)
            allowed = tolerance * (1.0 + np.abs(want.values)) + unit * growth
            off = (np.isnan(values) != np.isnan(want.values)) & ~(np.isnan(values) & want.may_be_nan)
            wrong = off | (np.abs(values - want.values) > allowed)
            # Nothing but minus infinity is close to it.
            wrong |= np.isneginf(want.values) & ~np.isneginf(values)
    if not wrong.any():
        return None
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"is {values[at]!r} at {at}, not {want.values[at]!r} ({int(wrong.sum())} of {wrong.size} are wrong)"


def memory(tensor: torch.Tensor) -> bytes:
    """Every byte of the tensor's storage, gaps included."""
    storage = tensor.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies in its own storage exactly as the tensor does in its."""
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    return whole.clone().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@cache
def kernels(operation: str) -> tuple[str, ...]:
    """The kernels of an operation, by any of its names, that this machine has."""
    return tuple(k.kernel_id for k in lz.list_kernels(operation) if k.available)


def taking(name: str, *args: Any, **kwargs: Any) -> list[str]:
    """The kernels that take this call of a public function."""
    operation = lz.which(FUNCTIONS[name].operation, *args, **kwargs).op
    return [kernel for kernel in kernels(operation) if lz.validate(kernel, *args, **kwargs)[0]]


def split(name: str, kwargs: Mapping[str, Any], count: int) -> tuple[list[Any], dict[str, Any]]:
    """The same arguments with up to `count` of them by position."""
    rest, leading = dict(kwargs), []
    for parameter in FUNCTIONS[name].positional[:count]:
        if parameter not in rest:
            break
        leading.append(rest.pop(parameter))
    return leading, rest


def everyone(name: str, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """The result of the public function and of every kernel that takes the call."""
    args, rest = split(name, kwargs, 3)
    yield "chosen", getattr(lz, name)(*args, **rest)
    for kernel in taking(name, *args, **rest):
        yield kernel, lz.run_kernel(kernel, *args, **rest)


class Family:
    """The cases of one family of operations, counted, and the kernels they reached."""

    def __init__(self) -> None:
        self.cases = 0
        self.reached: Counter[str] = Counter()
        self.functions: set[str] = set()

    def check(self, name: str, kwargs: Mapping[str, Any], want: Sequence[Expected]) -> None:
        """The chosen kernel and every other valid one give what is wanted, and touch nothing they were given."""
        self.cases += 1
        self.functions.add(name)
        args, rest = split(name, kwargs, self.cases % 6)
        given = {key: value for key, value in kwargs.items() if isinstance(value, torch.Tensor)}
        before = {key: memory(value) for key, value in given.items()}
        self._hold(name, "the chosen kernel", getattr(lz, name)(*args, **rest), want, given)
        for kernel in taking(name, *args, **rest):
            self.reached[kernel] += 1
            self._hold(name, kernel, lz.run_kernel(kernel, *args, **rest), want, given)
        if FUNCTIONS[name].out and self.cases % 3 == 0:
            out = filled((*want[0].values.shape, 2), want[0].dtype)[..., 0] if self.cases % 2 else None
            out = filled(want[0].values.shape, want[0].dtype) if out is None else out
            assert getattr(lz, name)(*args, **rest, out=out) is out, f"{name} did not return out"
            self._hold(name, "out", out, want, given)
        touched = [key for key, value in given.items() if memory(value) != before[key]]
        assert not touched, f"{name} wrote to {touched}"

    def _hold(self, name: str, by: str, got: Any, want: Sequence[Expected], given: Mapping[str, torch.Tensor]) -> None:
        results = got if isinstance(got, tuple) else (got,)
        assert len(results) == len(want), f"{name} by {by} gave {len(results)} results"
        for i, (result, expected) in enumerate(zip(results, want, strict=True)):
            wrong = difference(result, expected)
            assert wrong is None, f"{name} by {by}: result {i} {wrong}"
            mine = result.untyped_storage().data_ptr()
            shared = [key for key, value in given.items() if mine and value.untyped_storage().data_ptr() == mine]
            assert not shared, f"{name} by {by}: result {i} shares memory with {shared}"

    def check_update(self, name: str, kwargs: Mapping[str, Any], want: Mapping[str, Array]) -> None:
        """The same for an operation that updates some of its inputs, and writes to nothing around them."""
        self.cases += 1
        self.functions.add(name)
        runs: list[tuple[str, Callable[..., Any]]] = [("the chosen kernel", getattr(lz, name))]
        for kernel in taking(name, **kwargs):
            self.reached[kernel] += 1
            runs.append((kernel, partial(lz.run_kernel, kernel)))
        for by, run in runs:
            fresh = {key: twin(v) if isinstance(v, torch.Tensor) else v for key, v in kwargs.items()}
            args, rest = split(name, fresh, self.cases % 6)
            assert run(*args, **rest) is None, f"{name} by {by} returned something"
            for key, value in fresh.items():
                if not isinstance(value, torch.Tensor):
                    continue
                around = twin(kwargs[key])
                if key in want:
                    wrong = difference(value, Expected(want[key], value.dtype, exact=True))
                    assert wrong is None, f"{name} by {by}: {key} {wrong}"
                    around.copy_(value)
                assert memory(around) == memory(value), f"{name} by {by} wrote around or to {key}"

    def finish(self) -> None:
        """Enough cases were generated, and at full size no kernel of this machine was left out."""
        assert self.cases >= LEAST_CASES, f"only {self.cases} cases"
        if os.environ.get("LZ_TEST_SCALE") != "full":
            return
        here = {kernel for name in self.functions for kernel in kernels(FUNCTIONS[name].operation)}
        missed = here - set(self.reached)
        assert not missed, f"no generated case reached {sorted(missed)}"


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    """One family per test module. When all tests of the module have passed, they have been enough."""
    made, failed = Family(), request.session.testsfailed
    yield made
    asked = request.config
    whole = not asked.option.keyword and not any("::" in argument for argument in asked.args)
    if whole and request.session.testsfailed == failed:
        made.finish()


def agrees(case: Stored, want: Sequence[Expected]) -> None:
    """The reference gives what the file says, to the last digits float64 has."""
    assert case.expect is not None
    for result, (name, stored) in zip(want, case.expect.items(), strict=True):
        assert result.values.shape == stored.values.shape, name
        np.testing.assert_allclose(result.values, stored.values, rtol=1e-11, atol=1e-11, err_msg=name)


def run_stored(family: Family, case: Stored, want: Sequence[Expected]) -> None:
    """A case of testdata/ through every kernel; it is no generated one."""
    family.check(case.function, case.kwargs, want)
    family.cases -= 1


def is_refused(case: Stored) -> None:
    """A stored case whose data is at fault: an error that names one of the tensors."""
    with pytest.raises(lz.InvalidCallError) as caught:
        getattr(lz, case.function)(**case.kwargs)
    assert caught.value.code == "BAD_DATA"
    assert any(name in str(caught.value) for name in (*case.kwargs, "positions")), caught.value
