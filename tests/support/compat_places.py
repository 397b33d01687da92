"""Packages with backends of their own, for libraries that are made up: what `layerzero compat` is tried on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "python" / "layerzero"


class Place:
    """A package with backends of its own, and the libraries they are for."""

    def __init__(self, folder: Path, backends: Sequence[str]) -> None:
        self.folder = folder
        self.file = folder / "cache" / "layerzero" / "compat_matrix.json"
        package = folder / "site" / "layerzero"
        package.mkdir(parents=True)
        for entry in PACKAGE.iterdir():
            if entry.name != "backends":
                (package / entry.name).symlink_to(entry)
        (package / "backends").mkdir()
        (package / "backends" / "__init__.py").write_text(f"BACKENDS = {tuple(backends)!r}\nUNPROVEN = ('unproven',)\n")
        (package / "backends" / "contrib" / "unproven").mkdir(parents=True)
        document = {
            "schema_version": "1.0",
            "backend": "unproven",
            "backend_version": "1.0",
            "platform": "cpu",
            "ops": {},
        }
        (package / "backends" / "contrib" / "unproven" / "capabilities.json").write_text(json.dumps(document))

    def add(self, name: str, imports: str, kernels: dict[str, str], version: str = "1.0") -> None:
        """A library and its backend."""
        site = self.folder / "site"
        (site / f"lib_{name}.py").write_text(imports + "\n")
        noted = site / f"lib_{name}-{version}.dist-info"
        noted.mkdir()
        (noted / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lib_{name}\nVersion: {version}\n")
        (noted / "RECORD").write_text(f"lib_{name}.py,sha256=abc,1\n")
        backend = site / "layerzero" / "backends" / name
        backend.mkdir()
        kernel = {"dtypes": ["float32"], "requires_layouts": ["strided"], "params": {"approximate": {}}}
        described = [{"kernel_id": f"{name}.{kernel_id}", **kernel} for kernel_id in kernels]
        document = {
            "schema_version": "1.0",
            "backend": name,
            "backend_version": version,
            "platform": "cpu",
            "import_name": f"lib_{name}",
            "ops": {"activation.gelu": described},
        }
        (backend / "capabilities.json").write_text(json.dumps(document))
        lines = [f"def {k}(input, approximate):\n    {body}" for k, body in kernels.items()]
        lines += ["def detect():", f"    import lib_{name}", f"    return {version!r}"]
        lines += ["KERNELS = {" + ", ".join(f"'{name}.{k}': {k}" for k in kernels) + "}"]
        (backend / "adapter.py").write_text("\n".join(["import torch.nn.functional as F", *lines, ""]))

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which an interpreter finds this package, and keeps its caches here."""
        return {
            **os.environ,
            "PYTHONPATH": str(self.folder / "site"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the interpreter with this package."""
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=300, check=False)

    def answer(self, code: str) -> Any:
        """What the code prints, as JSON, on its last line."""
        done = self.python("-c", "import json\n" + textwrap.dedent(code))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])
