"""A library is imported when one of its kernels is about to run, and not to see whether it is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import layerzero
import pytest
import torch

#: What a package says when it is imported, and when the process ends.
NOISE = """
import atexit
print("{name} is imported", flush=True)
atexit.register(print, "{name} leaks")
"""
#: The packages of libraries, their distributions and versions; the modules their adapters look for.
LIBRARIES = {
    "zentorch": ("zentorch", "2.11.0.3", ()),
    "intel_extension_for_pytorch": ("intel_extension_for_pytorch", torch.__version__.partition("+")[0], ()),
    "quack": ("quack-kernels", "0.6.4", ("rmsnorm",)),
    "cudnn": ("nvidia-cudnn-frontend", "1.23.0", ()),
    "flashinfer": ("flashinfer-python", "0.6.18", ()),
    "flash_attn": ("flash_attn", "2.8.3", ()),
    "flash_attn/cute": ("flash-attn-4", "4.0.0b27", ("interface",)),
    "flash_attn_interface": ("flash-attn-3", "3.0.0", ()),
    "liger_kernel": ("liger_kernel", "0.6.2", ()),
    "xformers": ("xformers", "0.0.35", ()),
    "apex": ("apex", "0.1", ()),
    "sentencepiece": ("sentencepiece", "0.2.1", ()),
}
#: Operators as zentorch has them.
ZENTORCH = """
import torch
__version__ = "2.11.0.3"
library = torch.library.Library("zentorch", "DEF")
for schema in (
    "zentorch_bmm(Tensor self, Tensor mat2) -> Tensor",
    "zentorch_rms_norm(Tensor input, Tensor weight, float epsilon) -> Tensor",
    "zentorch_add_rms_norm_(Tensor(a!) input, Tensor weight, Tensor(b!) residual, float epsilon) -> ()",
    "zentorch_sdpa(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)",
):
    library.define(schema)
library.impl("zentorch_bmm", torch.bmm, "CPU")
"""
#: What programs begin with. Warnings go to the output, too.
PRELUDE = """
import json
import sys
import warnings
import torch
import layerzero as lz
warnings.showwarning = lambda message, *_: print("warning:", message)
x, w = torch.arange(8.0).view(2, 4), torch.arange(12.0).view(3, 4)
want = torch.nn.functional.linear(x, w)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a package of every library in it: each can be found, and says so when it is imported."""
    for place, (distribution, version, modules) in LIBRARIES.items():
        package = tmp_path / "site" / place
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(NOISE.format(name=place) + (ZENTORCH if place == "zentorch" else ""))
        for module in modules:
            (package / f"{module}.py").write_text("")
        record = tmp_path / "site" / f"{distribution.replace('-', '_')}-{version}.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    return tmp_path / "site"


def run(site: Path, program: str, **environment: str) -> list[str]:
    """The lines a program prints, in a process that finds the packages; whatever it prints, until it is over."""
    path = os.pathsep.join([str(site), str(Path(layerzero.__file__).parents[1])])
    caches = {"XDG_CACHE_HOME": str(site.parent / "cache"), "LAYERZERO_PERFDB_ENABLED": "0"}
    command = [sys.executable, "-c", PRELUDE + program]
    done = subprocess.run(
        command,
        env=os.environ | caches | {"PYTHONPATH": path} | environment,
        cwd=site.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (done.stdout + done.stderr).splitlines()


def needs_avx512() -> None:
    if "avx512f" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("no kernel of a library that is not torch's runs on this CPU")


def test_questions_and_calls_import_nothing(site: Path) -> None:
    said = run(
        site,
        """
with lz.avoid("zentorch", "apex"):
    assert torch.equal(lz.linear(x, w), want)
lz.rms_norm(x)
kernels = {k.kernel_id: k for k in lz.list_kernels()}
report = lz.explain("linear", x, w)
lz.which("linear", x, w)
versions = {b["name"]: (b["version"], b["unavailable"], b["imported"]) for b in json.loads(lz._native.backends())}
print(json.dumps([versions, kernels["zentorch.linear"].dispatch, len(str(report)) > 0, lz.ops() != []]))
""",
    )
    assert len(said) == 1, said
    versions, dispatch, *_ = json.loads(said[0])
    assert versions["zentorch"] == ["2.11.0.3", None, False]
    assert versions["quack"] == ["0.6.4", None, False]
    assert versions["torch"][2] is True
    assert dispatch == "foreign"


def test_nothing_but_torch_is_imported_where_torch_serves(site: Path) -> None:
    """Not even Triton, on a machine where torch sees a GPU: its kernels are known, and wait for their first use."""
    said = run(
        site,
        """
available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
before = set(sys.modules)
def packages():
    known = {*before, *sys.stdlib_module_names, "layerzero"}
    return sorted({name.partition(".")[0] for name in set(sys.modules) - before} - known)
with lz.avoid("zentorch", "apex"):
    lz.rms_norm(x)
    called = packages()
    torch.cuda.is_available = available
    lz.explain("rms_norm", x)
    lz.health()
    lz.readiness_check()
    import io
    lz.doctor(file=io.StringIO())
    lz.warmup("norm.rms", shapes=[(2, 8)], dtype=torch.float32, device="cpu")
state = next(b for b in json.loads(lz._native.backends()) if b["name"] == "triton")
kernel = next(k for k in lz.list_kernels() if k.kernel_id == "triton.rms_norm")
print(json.dumps([called, packages(), state["unavailable"], state["imported"], kernel.dispatch]))
""",
    )
    assert len(said) == 1, said
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    assert json.loads(said[0]) == [[], [], None, False, "foreign"]


def test_what_cannot_be_imported_is_not_tried_until_it_is_used(site: Path) -> None:
    for place in LIBRARIES:
        (site / place / "__init__.py").write_text("raise SystemExit('this would end the process')")
    assert run(site, "assert lz.linear(x, torch.ones(3, 4)).shape == (2, 3) or True\nprint('done')")[-1] == "done"


def test_the_doctor_says_what_it_has_not_tried(site: Path) -> None:
    said = run(site, "found = lz.doctor()")
    line = next(line for line in said if " zentorch " in line)
    assert "✓" in line and "version 2.11.0.3, not imported yet" in line, line
    assert not any("is imported" in line for line in said), said


def test_the_first_use_imports_it_once(site: Path) -> None:
    needs_avx512()
    said = run(
        site,
        """
for _ in range(3):
    assert torch.equal(lz.run_kernel("zentorch.linear", x, w), want)
with lz.prefer("zentorch"):
    assert lz.which("linear", x, w).kernel_id == "zentorch.linear"
    for _ in range(3):
        assert torch.equal(lz.linear(x, w), want)
print({b["name"]: b["imported"] for b in json.loads(lz._native.backends())}["zentorch"])
print([k for k in lz.health().to_dict()["kernels"] if k["failures"]])
""",
    )
    assert said == ["zentorch is imported", "True", "[]", "zentorch leaks"], said


def test_a_broken_library_is_found_at_its_first_use_and_the_call_goes_on(site: Path) -> None:
    needs_avx512()
    broken = 'print("tried", flush=True)\nraise OSError("libzen.so: cannot open shared object file")\n'
    (site / "zentorch" / "__init__.py").write_text(broken)
    said = run(
        site,
        """
with lz.prefer("zentorch"):
    print(lz.which("linear", x, w).kernel_id)
    for _ in range(3):
        assert torch.equal(lz.linear(x, w), want)
    print(lz.which("linear", x, w).kernel_id != "zentorch.linear")
reasons = lz.validate("zentorch.linear", x, w)[1]
print(*[reason.code for reason in reasons], *map(str, reasons))
state = next(b for b in json.loads(lz._native.backends()) if b["name"] == "zentorch")
print(state["unavailable"]["code"], state["imported"])
""",
    )
    assert said[0] == "zentorch.linear" and said[1] == "tried", said
    assert said.count("tried") == 1
    warning = next(line for line in said if line.startswith("warning:"))
    assert "zentorch.linear" in warning and "libzen.so: cannot open shared object file" in warning
    assert said[-3] == "True"
    assert said[-2].startswith("BACKEND_IMPORT_FAILED") and "libzen.so" in said[-2]
    assert said[-1] == "BACKEND_IMPORT_FAILED False"


def test_one_that_was_named_says_why_it_cannot_run(site: Path) -> None:
    needs_avx512()
    (site / "zentorch" / "__init__.py").write_text("raise SystemExit('not today')\n")
    said = run(
        site,
        """
try:
    lz.run_kernel("zentorch.linear", x, w)
except lz.KernelExecutionError as error:
    print("not today" in str(error))
""",
    )
    assert said == ["True"], said


def test_measuring_imports_it_before_it_is_timed(site: Path) -> None:
    needs_avx512()
    said = run(
        site,
        """
subject = lz._native.Subject("linear", {"input": x, "weight": w})
print(torch.equal(subject.run("zentorch.linear"), want))
""",
    )
    assert said == ["zentorch is imported", "True", "zentorch leaks"], said


def test_threads_import_it_once(site: Path) -> None:
    needs_avx512()
    said = run(
        site,
        """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    results = list(pool.map(lambda _: lz.run_kernel("zentorch.linear", x, w), range(32)))
print(all(torch.equal(result, want) for result in results))
""",
    )
    assert said == ["zentorch is imported", "True", "zentorch leaks"], said


def test_an_interrupted_import_says_nothing_of_the_library(site: Path) -> None:
    needs_avx512()
    package = site / "zentorch" / "__init__.py"
    text = package.read_text(encoding="utf-8")
    package.write_text(
        "import os, signal\nif not os.environ.pop('QUIET', ''): os.kill(os.getpid(), signal.SIGALRM)\n" + text
    )
    said = run(
        site,
        """
import os
import signal
def handler(*_):
    raise TimeoutError("too long")
signal.signal(signal.SIGALRM, handler)
try:
    lz.run_kernel("zentorch.linear", x, w)
except TimeoutError as error:
    print(error)
os.environ["QUIET"] = "1"
print(torch.equal(lz.run_kernel("zentorch.linear", x, w), want))
""",
    )
    assert said == ["too long", "zentorch is imported", "True", "zentorch leaks"], said
