"""What importing the package does and does not do, and that it works where torch, numpy or both are missing."""

from __future__ import annotations

import importlib.util
import inspect
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import layerzero as lz
import pytest
from layerzero.backends import BACKENDS
from processes import answer, python

HEAVY = ("torch", "numpy", "cupy", "triton", "cuda", "numba")


def test_import_brings_in_nothing_heavy() -> None:
    found = answer("""
        import sys
        import layerzero as lz
        lz.__version__, lz.attention.__doc__, lz.ops(), lz.LayerZeroError("x"), lz.TensorSpec((1,))
        loaded = open("/proc/self/maps").read()
        answer({"modules": sorted(sys.modules), "libraries": [n for n in ("libcuda", "libtorch", "libc10") if n in loaded]})
    """)
    assert [name for name in found["modules"] if name.partition(".")[0] in HEAVY] == []
    assert found["libraries"] == []
    # Backends are looked for when the first call is made.
    assert not [name for name in found["modules"] if name.startswith("layerzero.backends")]
    assert "layerzero.bench" not in found["modules"]


def test_all_names_every_public_thing() -> None:
    assert lz.__all__ == sorted(lz.__all__) and len(set(lz.__all__)) == len(lz.__all__)
    found = {name for name, value in vars(lz).items() if not name.startswith("_") and not isinstance(value, ModuleType)}
    assert found - {"annotations"} == set(lz.__all__) - {"__version__"}


@pytest.mark.parametrize("name", [n for n in lz.__all__ if n != "__version__"])
def test_every_public_thing_is_documented(name: str) -> None:
    thing = getattr(lz, name)
    assert inspect.getdoc(thing), name
    if inspect.isclass(thing):
        members = [m for m, value in vars(thing).items() if not m.startswith("_") and inspect.isfunction(value)]
        assert all(inspect.getdoc(getattr(thing, m)) for m in members), name


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from that has numpy and nothing else."""
    folder = tmp_path_factory.mktemp("without_torch")
    spec = importlib.util.find_spec("numpy")
    assert spec is not None and spec.origin is not None
    packages = Path(spec.origin).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (packages / name).exists():
            (folder / name).symlink_to(packages / name)
    return folder


NUMPY_ALONE = """
    import sys, warnings
    warnings.simplefilter("ignore")
    import numpy as np
    import layerzero as lz

    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 8), dtype=np.float32), rng.standard_normal(8, dtype=np.float32)
    double = x.astype(np.float64)
    normed = double / np.sqrt((double**2).mean(-1, keepdims=True) + 1e-6) * w

    def close(got, want):
        return bool(isinstance(got, np.ndarray) and got.shape == want.shape and abs(got - want).max() < 1e-6)

    def attention():
        q, k, v = (rng.standard_normal((1, 5, heads, 4), dtype=np.float32) for heads in (4, 2, 2))
        scores = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), np.repeat(k, 2, 2)) / 2.0
        scores[..., ~np.tri(5, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return close(lz.attention(q, k, v), np.einsum("bhij,bjhd->bihd", weights, np.repeat(v, 2, 2)))

    def append():
        caches = [np.zeros((2, 4, 1, 4), np.float32) for _ in range(2)]
        rows = [rng.standard_normal((3, 1, 4), dtype=np.float32) for _ in range(2)]
        lz.kv_append(*rows, *caches, np.array([5, -1, 0]))
        return bool((caches[0][1, 1] == rows[0][0]).all() and (caches[1][0, 0] == rows[1][2]).all())

    def quantize():
        values, scales, _ = lz.quantize(x, "int8")
        return bool(abs(lz.dequantize(values, scales) - x).max() <= 0.501 * scales.max())

    def seeds():
        draws = [lz.sample_topk(x, 3, seed=seed).tolist() for seed in (1, 1)]
        return draws[0] == draws[1] and lz.sample_topp(x, 0.5).shape == (3,)

    def out():
        given = np.empty_like(x)
        return lz.rms_norm(x, w, out=given) is given and close(given, normed)

    def several_dimensions():
        three = rng.standard_normal((2, 3, 4), dtype=np.float32)
        flat = three.reshape(2, 12).astype(np.float64)
        flat = (flat - flat.mean(-1, keepdims=True)) / np.sqrt(flat.var(-1, keepdims=True) + 1e-5)
        return close(lz.layer_norm(three, (3, 4)), flat.reshape(2, 3, 4))

    def unaligned():
        # Rows 18 bytes apart, which is no multiple of an element: read right, or refused.
        room = np.zeros(64, np.uint8)
        rows = np.ndarray((2, 4), np.float32, buffer=room, strides=(18, 4))
        rows[:] = x[:2, :4]
        try:
            return close(lz.gelu(rows), lz.gelu(x[:2, :4].copy()))
        except lz.LayerZeroError:
            return True

    def read_only():
        caches = [np.zeros((2, 4, 1, 4), np.float32) for _ in range(2)]
        caches[0].flags.writeable = False
        try:
            lz.kv_append(np.ones((1, 1, 4), np.float32), np.ones((1, 1, 4), np.float32), *caches, np.array([0]))
        except lz.LayerZeroError:
            return not caches[0].any()

    def refused():
        # numpy has neither of the two.
        for call in (lambda: lz.quantize(x, "fp8_e4m3"), lambda: lz.dequantize(*lz.quantize(x, "int8")[:2], dtype="bfloat16")):
            try:
                call()
                return False
            except lz.LayerZeroError as error:
                if "AttributeError" in str(error):
                    return str(error)
        return True

    checks = {
        "rms_norm": lambda: close(lz.rms_norm(x, w), normed),
        "backwards": lambda: close(lz.rms_norm(x[:, ::-1], w[::-1]), normed[:, ::-1]),
        "columns": lambda: close(lz.rms_norm(np.asfortranarray(x), w), normed),
        "which": lambda: lz.which("layer_norm", x).kernel_id.startswith("lz_cpu."),
        "attention": attention, "append": append, "quantize": quantize, "seeds": seeds, "out": out,
        "several_dimensions": several_dimensions, "unaligned": unaligned, "read_only": read_only, "refused": refused,
    }
    found = {}
    for name, check in checks.items():
        try:
            found[name] = check()
        except Exception as error:
            found[name] = repr(error)
    found["no_torch"] = "torch" not in sys.modules
    answer(found)
"""


@pytest.fixture(scope="module")
def numpy_alone(without_torch: Path) -> dict[str, Any]:
    """What came of each check where there is no torch. -S: no site-packages, so there is none to be found."""
    found: dict[str, Any] = answer(NUMPY_ALONE, "-S", path=[without_torch])
    return found


CHECKS = ("rms_norm", "backwards", "columns", "which", "attention", "append", "quantize", "seeds", "out")
MORE_CHECKS = ("several_dimensions", "unaligned", "read_only", "refused", "no_torch")


@pytest.mark.parametrize("check", CHECKS + MORE_CHECKS)
def test_numpy_is_enough(numpy_alone: dict[str, Any], check: str) -> None:
    assert numpy_alone[check] is True


def test_an_import_of_torch_that_is_forbidden_is_a_torch_that_is_missing() -> None:
    """Ways in which programs keep a module out: None in sys.modules, and a finder that refuses."""
    found = answer(
        """
        import os, sys, warnings
        warnings.simplefilter("ignore")

        class Refuses:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "torch":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        def tried(forbid):
            reader, writer = os.pipe()
            if os.fork() == 0:
                try:
                    forbid()
                    import layerzero as lz, numpy as np
                    result = f"{lz.rms_norm(np.full((2, 4), 3.0, np.float32)).sum():.3f}"
                    result += "".join(" " + b["name"] for b in lz.doctor(file=sys.stderr).backends if b["unavailable"])
                except BaseException as error:
                    result = repr(error)
                os.write(writer, result.encode())
                os._exit(0)
            os.close(writer)
            with os.fdopen(reader) as answers:
                return answers.read()

        answer([tried(lambda: sys.modules.__setitem__("torch", None)), tried(lambda: sys.meta_path.insert(0, Refuses()))])
        """
    )
    # Tokenizers do without it.
    of_torch = set(BACKENDS) - {"tokenizers", "tiktoken", "sentencepiece"}
    assert found == [" ".join(["8.000", *sorted(of_torch)])] * 2


def test_neither_torch_nor_numpy_is_needed_to_ask() -> None:
    found = answer(
        """
        import io
        import layerzero as lz
        text = io.StringIO()
        diagnosis = lz.doctor(file=text)
        chosen = lz.which("rms_norm", lz.TensorSpec((2, 8), "bfloat16"))
        try:
            lz.rms_norm([1.0])
        except lz.ArgumentTypeError as error:
            refused = error.to_dict()
        answer({"which": chosen.kernel_id, "refused": refused["code"], "doctor": text.getvalue(),
                "backends": {b["name"]: b["unavailable"] and b["unavailable"]["code"] for b in diagnosis.backends}})
        """,
        "-S",
    )
    assert found["which"].startswith("lz_cpu.rms_norm") and found["refused"] == "NOT_A_TENSOR"
    assert found["backends"]["torch"] == "NOT_INSTALLED" and found["backends"]["lz_cpu"] is None
    assert "torch is not installed" in found["doctor"]


LATER = """
    import multiprocessing, sys, warnings
    {imports}
    import layerzero as lz, torch
    torch.set_num_threads(1)
    x = torch.arange(12.0).reshape(3, 4)

    def call(_):
        return [lz.which("rms_norm", x).kernel_id, lz.rms_norm(x).double().sum().item()]

    workers = multiprocessing.get_context("fork")
    with workers.Pool(1) as pool:
        forked_first = pool.map(call, range(1))
    here = call(0)
    with workers.Pool(1) as pool:
        forked_later = pool.map(call, range(1))
    answer({{"calls": [*forked_first, here, *forked_later], "operator": str(torch.ops.layerzero.rms_norm.default),
            "heavy": sorted(n for n in ("torch._dynamo", "torch._inductor") if n in sys.modules)}})
"""


@pytest.mark.parametrize("imports", ["import layerzero", "import torch"], ids=["layerzero-first", "torch-first"])
def test_either_is_imported_first_and_workers_are_forked(imports: str) -> None:
    found = answer(LATER.format(imports=imports))
    assert [call[0] for call in found["calls"]] == ["torch.rms_norm"] * 3
    sums = [call[1] for call in found["calls"]]
    rows = [(0.0, 1.0, 2.0, 3.0), (4.0, 5.0, 6.0, 7.0), (8.0, 9.0, 10.0, 11.0)]
    expected = sum(sum(row) / math.sqrt(sum(n * n for n in row) / 4) for row in rows)
    assert sums == pytest.approx([expected] * 3, rel=1e-6)
    assert found["operator"] == "layerzero.rms_norm.default"
    # A first call must not wait for torch's compiler to be imported.
    assert found["heavy"] == []


def test_the_command_line_is_there() -> None:
    # -S: without torch, whose import takes seconds.
    asked = ["select", "--op", "rms_norm", "--shape", "input=8x64", "--dtype", "float32", "--json"]
    done = python("-S", "-m", "layerzero", *asked)
    assert done.returncode == 0, done.stderr
    assert "lz_cpu.ref.norm.rms" in done.stdout
    assert python("-S", "-m", "layerzero", "no-such-command").returncode == 2
