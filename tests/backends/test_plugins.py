"""Installed plugins: the example package serves calls, and a broken one is disabled without disturbing anybody."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from processes import SUPPORT, answer, forked

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"

SERVED = """
    import io, sys, warnings
    sys.path.insert(0, {tests!r})
    import torch
    import layerzero as lz
    import reference
    torch.set_num_threads(1)
    torch.manual_seed(0)
    diagnosis = lz.doctor(file=io.StringIO())
    off = {{}}

    def note(name, dtype, got, want):
        assert got.dtype == dtype and got.shape == want.shape
        key = f"{{name}} {{str(dtype).removeprefix('torch.')}}"
        difference = abs(got.double().numpy() - want) / (1.0 + abs(want))
        off[key] = max(off.get(key, 0.0), float(difference.max()))

    shapes = [(1, 5, 300, 4, 2, 8, 8), (2, 70, 90, 2, 2, 4, 6), (1, 260, 270, 2, 1, 8, 8), (1, 1, 513, 2, 1, 16, 16)]
    options = [{{}}, {{"softcap": 5.0}}, {{"window": 7}}, {{"window": (3, 2), "causal": False}}, {{"alibi": True}},
               {{"causal": False, "softcap": 2.0, "alibi": True}}, {{"scale": 0.3, "window": (200, 0)}}]
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for i, (batch, seq_q, seq_k, heads, kv_heads, dim, v_dim) in enumerate(shapes):
        for j, chosen in enumerate(options):
            kwargs, dtype = dict(chosen), dtypes[(i + j) % 4]
            layout = ("BSHD", "BHSD")[j % 2]
            slopes = torch.rand(heads) if kwargs.pop("alibi", False) else None
            call = [torch.randn(batch, s, h, d).to(dtype)
                    for s, h, d in ((seq_q, heads, dim), (seq_k, kv_heads, dim), (seq_k, kv_heads, v_dim))]
            if layout == "BHSD":
                call = [t.transpose(1, 2) for t in call]
            got = lz.run_kernel("lz_example.attention.chunked", *call, layout=layout, alibi_slopes=slopes, **kwargs)
            window = kwargs.pop("window", (-1, -1))
            want = reference.attention(*(t.double().numpy() for t in call), layout=layout, **kwargs,
                                       window=(window, -1) if isinstance(window, int) else window,
                                       alibi_slopes=None if slopes is None else slopes.double().numpy())
            note("attention", dtype, got, want.values)
    for dtype in dtypes[1:]:
        for shape in ((3, 5, 16), (2000, 128), (1, 70000), (0, 8)):
            x, w = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
            wide = x.double()
            want = (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()).numpy()
            if want.size:
                note("rms_norm", dtype, lz.run_kernel("lz_example.rms_norm.blocked", x, w), want)
            else:
                assert lz.run_kernel("lz_example.rms_norm.blocked", x, w).shape == x.shape

    q = k = v = torch.randn(1, 6, 2, 4)
    v = v.clone()
    v[0, 5] = float("nan")
    poisoned = lz.run_kernel("lz_example.attention.chunked", q, k, v)
    q = torch.randn(1, 32, 4, 8)
    answer({{
        "backend": [b for b in diagnosis.backends if b["name"] == "lz_example"],
        "kernels": sorted(k.kernel_id for k in lz.list_kernels() if k.backend == "lz_example" and k.available),
        "softcapped": lz.which("attention", q, q, q, softcap=30.0).kernel_id,
        "plain": lz.which("attention", q, q, q).kernel_id,
        "agrees": bool(torch.allclose(lz.attention(q, q, q, softcap=30.0),
                                      lz.run_kernel("torch.attention.unfused", q, q, q, softcap=30.0), atol=1e-5)),
        "gradients": lz.which("attention", q.requires_grad_(), q, q, softcap=30.0).kernel_id,
        "nan": [bool(poisoned[0, :5].isnan().any()), bool(poisoned[0, 5].isnan().all())],
        "off": off,
    }})
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example installed, as `pip install` would."""
    folder = tmp_path_factory.mktemp("plugin")
    # A copy, because building leaves files behind.
    source = shutil.copytree(PLUGIN, folder / "source")
    command = [Path(sys.executable).parent / "uv", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    where = ["--offline", "--python", sys.executable, "--target", folder / "site", source]
    done = subprocess.run([*command, *where], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def served(installed: Path) -> dict[str, Any]:
    """What a program sees where the example is installed."""
    found: dict[str, Any] = forked(SERVED.format(tests=str(SUPPORT)), path=[installed])
    return found


def test_installing_is_enough(served: dict[str, Any]) -> None:
    (backend,) = served["backend"]
    assert backend["unavailable"] is None and backend["version"] == "0.1.0" and backend["origin"] == "entry_point"
    assert served["kernels"] == ["lz_example.attention.chunked", "lz_example.rms_norm.blocked"]


def test_it_serves_the_calls_it_is_best_for(served: dict[str, Any]) -> None:
    # A native kernel of LayerZero takes the call too, with a higher priority.
    assert served["softcapped"].startswith(("lz_example.attention.chunked", "lz_cpu.attention.")) and served["agrees"]
    assert (
        served["plain"].startswith(("torch.sdpa.", "lz_cpu.attention."))
        and served["gradients"] == "torch.attention.unfused"
    )


def test_it_is_right_to_the_last_digits_its_dtype_has(served: dict[str, Any]) -> None:
    most = {"float64": 1e-14, "float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}
    assert {key.split()[1] for key in served["off"]} == set(most) and len(served["off"]) == 7
    assert not {key: off for key, off in served["off"].items() if not off <= most[key.split()[1]]}
    assert served["nan"] == [False, True]


# --- plugins that are broken ------------------------------------------------------------------------------------------

BROKEN = {
    "no_module": ("no_such_module:register", ""),
    "no_function": ("broken_a:register", "x = 1"),
    "import_error": ("broken_b:register", "import a_library_nobody_has"),
    "syntax": ("broken_c:register", "def register(:"),
    "raises": ("broken_d:register", "def register():\n    raise RuntimeError('no licence\\nfound anywhere')"),
    "document": (
        "broken_e:register",
        "def register():\n    import layerzero\n    layerzero.register_backend({'schema_version': '1.0'}, {})",
    ),
    "half": (
        "broken_g:register",
        """
        def register():
            import layerzero as lz
            lz.register_kernel(operation='activation.gelu', kernel_id='halfway.gelu', platform='cpu',
                               supported_dtypes=['float32'], priority=99)(lambda input: input)
            raise RuntimeError('and then it broke')
        """,
    ),
    "fine": (
        "working:register",
        """
        def register():
            import layerzero as lz
            lz.register_kernel(operation='norm.rms', kernel_id='fine.norm', platform='cpu',
                               supported_dtypes=['float32'], priority=98)(lambda input, eps: input + eps)
        """,
    ),
}


def install(folder: Path, name: str, target: str, code: str) -> None:
    """A package with one module, and an entry point into it, as an installer leaves it."""
    if code:
        (folder / f"{target.partition(':')[0]}.py").write_text(textwrap.dedent(code))
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[layerzero.backends]\n{name} = {target}\n")


@pytest.fixture(scope="module")
def beside_broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a program sees where every broken plugin is installed, and one that works."""
    folder = tmp_path_factory.mktemp("broken")
    for name, (target, code) in BROKEN.items():
        install(folder, name, target, code)
    found: dict[str, Any] = forked(
        """
        import io, warnings
        import torch
        import layerzero as lz
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            text = io.StringIO()
            diagnosis = lz.doctor(file=text)
        x = torch.randn(3, 8)
        answer({
            "told": [(w.category.__name__, str(w.message)) for w in told],
            "doctor": text.getvalue(),
            "backends": {b["name"]: b["unavailable"] for b in diagnosis.backends},
            "chosen": lz.which("rms_norm", x).kernel_id,
            "right": bool(torch.equal(lz.rms_norm(x, eps=1.0), x + 1.0)),
            "kernels": [k.kernel_id for k in lz.list_kernels("gelu") if k.available],
            "others": lz.which("silu_mul", x, x).kernel_id,
        })
        """,
        path=[folder],
    )
    return found


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_module", "No module named 'no_such_module'"),
        ("no_function", "has no attribute 'register'"),
        ("import_error", "No module named 'a_library_nobody_has'"),
        ("syntax", "SyntaxError"),
        ("raises", "RuntimeError: no licence"),
        ("document", "capabilities"),
        ("half", "and then it broke"),
    ],
)
def test_a_broken_plugin_is_disabled_with_its_reason(beside_broken: dict[str, Any], name: str, reason: str) -> None:
    why = beside_broken["backends"][name]
    assert why["code"] == "BACKEND_IMPORT_FAILED" and reason in why["message"] and "\n" not in why["message"]
    (line,) = (line for line in beside_broken["doctor"].splitlines() if line.split()[:2] == ["✗", name])
    assert reason in line
    told = [text for category, text in beside_broken["told"] if category == "LayerZeroWarning" and f"'{name}'" in text]
    assert len(told) == 1 and reason in told[0] and BROKEN[name][0] in told[0]


def test_everything_else_works_beside_it(beside_broken: dict[str, Any]) -> None:
    assert beside_broken["chosen"] == "fine.norm" and beside_broken["right"]
    assert beside_broken["others"].startswith(("torch.", "lz_cpu.")) and beside_broken["backends"]["torch"] is None
    assert len(beside_broken["told"]) == len(BROKEN) - 1


def test_what_a_plugin_registered_before_it_broke_is_gone(beside_broken: dict[str, Any]) -> None:
    assert "halfway.gelu" not in beside_broken["kernels"]


def test_a_plugin_that_ends_the_program_does_not(tmp_path: Path) -> None:
    install(tmp_path, "exits", "exits:register", "def register():\n    raise SystemExit('no licence')")
    found = answer(
        """
        import io, warnings
        import layerzero as lz
        warnings.simplefilter("ignore")
        answer({b["name"]: b["unavailable"] for b in lz.doctor(file=io.StringIO()).backends})
        """,
        "-S",
        path=[tmp_path],
    )
    assert "SystemExit: no licence" in found["exits"]["message"] and found["lz_cpu"] is None
