"""What is shipped: extras, the sdist, the release workflow, the images. Names and versions agree wherever they are said."""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from layerzero import backend_files
from layerzero.backends import BACKENDS, UNPROVEN
from layerzero.compat import builds
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
CARGO: dict[str, Any] = tomllib.loads((ROOT / "Cargo.toml").read_text())
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
IMAGES = ("cpu", "cuda12", "cuda13", "rocm")
#: Libraries that no package index has, or only a stranger's package of that name.
ELSEWHERE = {"apex", "aiter", "flash_attn_interface", "habana_frameworks"}
#: Extras that are left out of `all`, with the reason in pyproject.toml.
APART = {"flash-attn", "zentorch"}


def imported(script: str) -> ModuleType:
    """A script, without running it."""
    spec = importlib.util.spec_from_file_location(script, ROOT / "scripts" / f"{script}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def extras() -> dict[str, list[Requirement]]:
    """The extras and what they install."""
    listed = PROJECT["project"]["optional-dependencies"].items()
    return {name: [Requirement(one) for one in all_of] for name, all_of in listed}


def pythons() -> list[str]:
    """The versions of Python that the package names."""
    lead = "Programming Language :: Python :: 3."
    return [one.removeprefix(lead[:-2]) for one in PROJECT["project"]["classifiers"] if one.startswith(lead)]


# --- extras -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [*BACKENDS, *UNPROVEN])
def test_each_library_has_an_extra_with_the_bounds_of_its_document(backend: str) -> None:
    document = backend_files.document(backend)
    library = str(document.get("import_name", backend))
    distribution = canonicalize_name(builds.distribution_name(library))
    found = [one for all_of in extras().values() for one in all_of if canonicalize_name(one.name) == distribution]
    if library in ELSEWHERE or backend in ("flash_attn_ck", "flash_attn_triton"):
        # The builds of flash-attn for ROCm are made from its sources, and have versions of the same extra.
        return
    assert len(found) == 1, f"no extra installs {distribution}"
    names = {backend, library.partition(".")[0], str(document.get("library", backend))}
    bounds = [one for text in document["requires"] if (one := Requirement(text)).name in names]
    if backend != "flash_attn_4_tiles":
        # Its kernels need a later one than its library's others.
        assert all(one.specifier == found[0].specifier for one in bounds), (bounds, found)


def test_all_is_every_extra_that_wheels_can_give() -> None:
    inside = {extra for one in extras()["all"] for extra in one.extras}
    assert all(one.name == PROJECT["project"]["name"] for one in extras()["all"])
    assert inside == set(extras()) - APART - {"all"}


def test_no_extra_brings_a_stranger_along() -> None:
    names = {canonicalize_name(one.name) for all_of in extras().values() for one in all_of}
    assert not names & {"apex", "aiter", "flashinfer", "quack", "cudnn"}


# --- the wheel and the sdist ------------------------------------------------------------------------------------------


def test_the_pythons_that_are_named_are_tried() -> None:
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert pythons()[0] == oldest and len(pythons()) == 4
    script = (ROOT / "scripts/check_wheel.sh").read_text()
    assert f"pythons='{' '.join(pythons())}'" in script
    assert WORKFLOW["jobs"]["try"]["strategy"]["matrix"]["python"] == pythons()
    # The oldest torch, and the newest there is.
    oldest_torch = next(iter(extras()["torch"][0].specifier)).version
    assert re.search(rf"torches='none {oldest_torch}\.0 newest'", script)


@pytest.mark.parametrize("options", [["--frob", "1"], ["--wheel"], ["--wheel", "no/such.whl"]])
def test_a_wrong_call_of_the_matrix_is_an_error_that_says_so(options: list[str]) -> None:
    done = subprocess.run(
        ["bash", ROOT / "scripts/check_wheel.sh", *options], check=False, capture_output=True, text=True
    )
    assert done.returncode == 2 and options[-1] in done.stderr or options[0] in done.stderr


def test_a_wrong_result_is_seen(tmp_path: Path) -> None:
    document = json.loads((ROOT / "testdata/ops/norm.rms.json").read_text())

    def tried() -> subprocess.CompletedProcess[str]:
        (tmp_path / "norm.rms.json").write_text(json.dumps(document))
        command = [sys.executable, ROOT / "scripts/try_wheel.py", tmp_path]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)

    right = tried()
    assert right.returncode == 0 and "1 operations" in right.stdout, right.stderr
    case = next(one for one in document["cases"] if one["inputs"]["input"]["dtype"] == "float32" and "expect" in one)
    case["expect"]["output"]["data"][0] += 0.01
    wrong = tried()
    assert wrong.returncode != 0 and "norm.rms" in wrong.stderr and "wrong at 1 of" in wrong.stderr


def test_the_sdist_has_all_that_a_build_reads(tmp_path: Path) -> None:
    maturin = shutil.which("maturin", path=str(Path(sys.prefix) / "bin"))
    if maturin is None or shutil.which("cargo") is None:
        pytest.skip("maturin and cargo make the sdist")
    # Tests have a home of their own, in which rustup finds no toolchain.
    environment = {**os.environ, "HOME": pwd.getpwuid(os.getuid()).pw_dir}
    command = [maturin, "sdist", "--out", tmp_path]
    packed = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=300
    )
    assert packed.returncode == 0, packed.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (source,) = (one for one in tmp_path.iterdir() if one.is_dir())
    for needed in ("Cargo.lock", "LICENSE", "README.md", "SECURITY.md", "CITATION.cff", "CHANGELOG.md", "PKG-INFO"):
        assert (source / needed).is_file(), needed
    assert (source / "python/layerzero/backends/torch/capabilities.json").is_file()
    files = [one for one in source.rglob("*") if one.is_file()]
    assert not [one for one in files if one.suffix in (".so", ".pyc")]
    # Files that are compiled in.
    for file in source.glob("crates/*/src/**/*.rs"):
        for path in re.findall(r"include_(?:str|bytes)!\(\s*\"([^\"]+)\"", file.read_text(encoding="utf-8")):
            assert (file.parent / path).is_file(), f"{file.relative_to(source)} includes {path}"
    devices = list((source / "crates/lz-hardware/data/devices").glob("*.json"))
    assert len(devices) == len(list((ROOT / "crates/lz-hardware/data/devices").glob("*.json")))
    # Its members, and a lock that is theirs.
    metadata = ["cargo", "metadata", "--locked", "--offline", "--no-deps", "--format-version", "1"]
    members = subprocess.run(metadata, cwd=source, env=environment, check=False, capture_output=True, timeout=120)
    assert members.returncode == 0, members.stderr
    assert "lz-python" in {one["name"] for one in json.loads(members.stdout)["packages"]}


# --- releases ---------------------------------------------------------------------------------------------------------


def test_the_workflow_uses_the_versions_that_the_project_names() -> None:
    said = WORKFLOW["env"]
    assert said["RUST"] == CARGO["workspace"]["package"]["rust-version"]
    (maturin,) = map(Requirement, PROJECT["build-system"]["requires"])
    assert maturin.specifier.contains(said["MATURIN"].removeprefix("v"))
    assert f"maturin=={said['MATURIN'].removeprefix('v')}" in (ROOT / "requirements-dev.in").read_text()
    assert (ROOT / "requirements-build.txt").read_text() == f"maturin=={said['MATURIN'].removeprefix('v')}\n"
    assert f"UV := uv=={said['UV']}\n" in (ROOT / "Makefile").read_text()
    url = WORKFLOW["jobs"]["publish"]["environment"]["url"]
    assert url == f"https://pypi.org/project/{PROJECT['project']['name']}/"


def test_the_workflow_pins_what_it_runs_and_gives_only_the_rights_it_needs() -> None:
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]
    assert used and all(re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", one) for one in used)
    text = (ROOT / ".github/workflows/release.yml").read_text()
    assert len(re.findall(r"uses: \S+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", text, re.MULTILINE)) == len(used)
    assert WORKFLOW["permissions"] == {"contents": "read"}
    writing = {name for name, job in WORKFLOW["jobs"].items() if "write" in job.get("permissions", {}).values()}
    assert writing == {"publish"} and "secrets." not in text
    # Values of the event reach a shell through the environment only.
    assert not [step["run"] for step in steps if "${{" in step.get("run", "")]
    publish = WORKFLOW["jobs"]["publish"]
    assert set(publish["needs"]) == {"try", "sdist"} and "tag" in publish["if"]
    targets = {one["target"] for one in WORKFLOW["jobs"]["wheel"]["strategy"]["matrix"]["include"]}
    assert targets == {"x86_64", "aarch64"} == set(WORKFLOW["jobs"]["try"]["strategy"]["matrix"]["target"])


def test_a_release_is_refused_unless_its_names_agree() -> None:
    names = imported("release_names")
    repository = PROJECT["project"]["urls"]["Source"].removeprefix("https://github.com/")
    version = CARGO["workspace"]["package"]["version"]
    assert names.problems("branch", "main", repository) == []
    assert len(names.problems("branch", "main", "somebody/else")) == len(PROJECT["project"]["urls"])
    # A name that only begins like it is another repository.
    assert names.problems("branch", "main", repository[:-1])
    assert any("the tag must be" in one for one in names.problems("tag", "v99.0.0", repository))
    assert not any("the tag" in one for one in names.problems("tag", f"v{version}", repository))


def test_the_citation_names_this_version_and_repository() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["authors"] and citation["message"]
    assert citation["version"] == CARGO["workspace"]["package"]["version"]
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["repository-code"] == PROJECT["project"]["urls"]["Source"]


# --- images -----------------------------------------------------------------------------------------------------------


def instructions(image: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, with continued lines joined."""
    text = (ROOT / "containers" / f"{image}.Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest) for word, rest in lines]


def pins(image: str) -> dict[str, str]:
    """Every package of an image, with its version."""
    lines = (ROOT / "containers" / f"{image}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_made_from_the_wheel_and_runs_without_rights(image: str) -> None:
    all_of = instructions(image)
    said = dict(all_of)
    assert re.fullmatch(r"[\w./-]+:[\w.-]+", said["FROM"]) and not said["FROM"].endswith(":latest")
    assert said["USER"] == "10001:10001"
    assert said["HEALTHCHECK"].endswith('CMD ["layerzero", "ready"]')
    assert json.loads(said["VOLUME"]) == ["/var/cache/layerzero", "/var/lib/layerzero"]
    assert "dist/*.whl" in said["COPY"] and f"{image}.txt" in said["COPY"]
    assert said["RUN"].startswith(f"/tmp/layerzero/install.sh /tmp/layerzero {image} ")
    # Nothing runs after the rights are given up but what the user starts.
    order = [word for word, _ in all_of]
    assert order.index("RUN") < order.index("USER") < order.index("ENTRYPOINT") and order.count("RUN") == 1
    assert f"containers/{image}.Dockerfile" in (ROOT / "containers" / f"{image}.Dockerfile").read_text()


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_pins_what_it_asks_for(image: str) -> None:
    asked = (ROOT / "containers" / f"{image}.in").read_text().splitlines()
    for requirement in (Requirement(line) for line in asked if line and not line.startswith("#")):
        version = pins(image)[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), requirement
    assert Version(pins(image)["torch"]) >= Version("2.10")


def test_an_image_has_one_cuda() -> None:
    """CUTLASS' compiler has libraries for both, of which it loads those for the driver."""
    for image, other in (("cuda12", "13"), ("cuda13", "12")):
        strangers = [name for name in pins(image) if re.search(rf"cu{other}$", name)]
        assert [name for name in strangers if "cutlass-dsl-libs" not in name] == []
        base = dict(instructions(image))["FROM"]
        major = image.removeprefix("cuda")
        assert base.startswith(f"nvidia/cuda:{major}.")
        assert pins(image)["cuda-python"].startswith(f"{major}.")
    assert "nvidia-cuda-runtime-cu12" in pins("cuda12") and pins("cuda13")["nvidia-cuda-runtime"].startswith("13.")
    for image in ("cpu", "rocm"):
        assert not [name for name in pins(image) if name.startswith(("nvidia-", "cuda-", "triton"))]


@pytest.mark.parametrize("wheels", [[], ["a.whl", "b.whl"]])
def test_an_image_needs_exactly_one_wheel(tmp_path: Path, wheels: list[str]) -> None:
    for wheel in wheels:
        (tmp_path / wheel).touch()
    command = ["sh", ROOT / "containers/install.sh", tmp_path, "cpu"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "PREFIX": str(tmp_path)}
    )
    assert done.returncode == 1 and "one wheel is needed" in done.stderr
    assert all(wheel in done.stderr for wheel in wheels or ["none"])
    assert not (tmp_path / "opt").exists()
