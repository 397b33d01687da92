"""Makes the files of a new backend, which work and serve one operation: fill in what the library really does.

    python scripts/new_backend.py acme --distribution acme-kernels --op norm.rms --function rmsnorm

writes the folder `python/layerzero/backends/contrib/acme` and a test, and adds the backend's line to `UNPROVEN`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

ADAPTER = '''"""{title} (`{module}`).

Not run on hardware: tested against a function of the same signature.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..._shared.library import Library

_library = Library("{module}", "{function}")
detect = _library.find


def {kernel}({parameters}) -> Any:
    """{does}"""
    return _library.{function}({arguments})


KERNELS: dict[str, Callable[..., Any]] = {{"{name}.{kernel}": {kernel}}}
'''

TEST = '''"""{title}: its kernels over every case of testdata/ they take, with a fake of the library that notes its calls."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import adapter_cases
import layerzero as lz
import pytest


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of the library's function, which computes what the reference does."""
    noted: list[tuple[Any, ...]] = []

    def {function}({untyped}) -> Any:
        noted.append({noted})
        return lz.run_kernel("lz_cpu.ref.{op}", {keywords})

    module = ModuleType("{module}")
    module.__dict__.update(__version__="{version}", {function}={function})
    monkeypatch.setitem(sys.modules, "{module}", module)
    assert adapter_cases.adapter("{name}").detect() == "{version}"
    return noted


@pytest.mark.parametrize("kernel", adapter_cases.kernels("{name}"), ids=lambda kernel: kernel.id)
def test_every_case_it_takes_is_right(calls: list[tuple[Any, ...]], kernel: adapter_cases.Kernel) -> None:
    cases = [case for op in kernel.ops for case in adapter_cases.cases(op)]
    taken = [case for case in cases if adapter_cases.reason_to_skip(kernel, case) is None]
    wrong = {{case.name: problems for case in taken if (problems := adapter_cases.run(kernel, case))}}
    assert wrong == {{}}
    assert len(calls) == len(taken) > 0
'''


def arguments_of(op: str, schema: dict[str, Any], takes: Sequence[str]) -> list[str]:
    """What the kernel is given: the tensors and parameters that are not optional, those it ``takes``, its layout."""
    optional = {name: is_optional for kind in ("inputs", "params") for name, is_optional in schema[kind].items()}
    if unknown := [name for name in takes if name not in optional]:
        sys.exit(f"{op} has no {', '.join(unknown)}; it has {', '.join(optional)}")
    names = [name for name in optional if name in takes or not optional[name] and name != "seed"]
    return names + (["layout"] if schema["layouts"] else [])


def files(options: argparse.Namespace) -> dict[str, str]:
    """The text of each file of the backend's folder, and of its test."""
    from layerzero import _native
    from layerzero.kernels import _describe

    schema = _native.schema(options.op)
    names = arguments_of(options.op, schema, options.optional)
    kernel = options.op.replace(".", "_")
    kernel_id = f"{options.name}.{kernel}"
    kinds = {name: "Tensor" if name in schema["inputs"] else "str" if name == "layout" else "Any" for name in names}
    shared = {"supports_gqa": True} if ".gqa." in options.op else {}
    described = _describe(options.op, kernel_id, options.platform, options.dtypes, None, names, shared)
    capabilities = {
        "schema_version": "1.0",
        "backend": options.name,
        "backend_version": options.version,
        "platform": options.platform,
        "import_name": options.module,
        "plugin_origin": "builtin",
        "proven": False,
        "requires": ["torch>=2.10"],
        "ops": {options.op: [{"priority": 50, **described}]},
    }
    library = {
        "distribution": options.distribution,
        "serves": options.op,
        "run": [],
        "why": "tried with recording fakes of the library",
    }
    words = {
        "title": options.distribution,
        "name": options.name,
        "module": options.module,
        "function": options.function,
        "kernel": kernel,
        "op": options.op,
        "does": f"`{options.op}` by the library's `{options.function}`.",
        "version": options.version,
        "parameters": ", ".join(f"{name}: {kind}" for name, kind in kinds.items()),
        "untyped": ", ".join(f"{name}: Any" for name in names),
        "arguments": ", ".join(names),
        "noted": f"({', '.join(names)}{',' if len(names) == 1 else ''})",
        "keywords": ", ".join(f"{name}={name}" for name in names),
    }
    return {
        "__init__.py": f'"""{options.distribution}."""\n',
        "capabilities.json": json.dumps(capabilities, indent=2) + "\n",
        "library.json": json.dumps(library, indent=2) + "\n",
        "adapter.py": ADAPTER.format(**words),
        "test": TEST.format(**words),
    }


def with_line(text: str, name: str) -> str:
    """The list of backends with one more line, at the end of those that were never run."""
    found = re.search(r"UNPROVEN: tuple\[str, \.\.\.\] = \((?:\n    \"\w+\",)*\n", text)
    if found is None:
        sys.exit("backends/__init__.py has no list UNPROVEN with a name on each line")
    return f'{text[: found.end()]}    "{name}",\n{text[found.end() :]}'


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the process where one of them cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the backend's name, which is that of its folder")
    parser.add_argument("--distribution", required=True, help="what the library is installed as")
    parser.add_argument(
        "--op", required=True, help="the operation it serves, e.g. norm.rms ('layerzero ops' lists them)"
    )
    parser.add_argument("--module", help="what is imported (the distribution's name with '_')")
    parser.add_argument("--function", help="the library's function (the operation's last word)")
    parser.add_argument("--platform", default="cuda", help="where its kernel runs (cuda)")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32", "float16", "bfloat16"])
    parser.add_argument(
        "--optional",
        type=lambda text: text.split(","),
        default=[],
        help="optional arguments that its kernel supports, with commas",
    )
    parser.add_argument("--version", default="0", help="the version that its sources were read at (0)")
    parser.add_argument("--package", type=Path, default=ROOT / "python" / "layerzero", help=argparse.SUPPRESS)
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.module = options.module or options.distribution.replace("-", "_")
    options.function = options.function or options.op.rpartition(".")[2]
    if not re.fullmatch(r"[a-z][a-z0-9_]*", options.name):
        parser.error(f"'{options.name}' cannot be a folder's name: use lower-case letters, digits and '_'")
    for folder in (options.package / "backends", options.package / "backends" / "contrib"):
        if (folder / options.name).exists():
            parser.error(f"there is a backend '{options.name}' already: {folder / options.name}")
    if not options.function.isidentifier():
        parser.error(f"'{options.function}' is not the name of a function; give one with --function")
    return options


def check_operation(op: str) -> None:
    """Ends the process where there is no such operation, or only an alias of several."""
    from difflib import get_close_matches

    import layerzero as lz

    known = [name for function in lz.ops() for name in function.ops]
    if op not in known:
        near = get_close_matches(op, known, 3) or known
        sys.exit(f"'{op}' is not an operation; one of: {', '.join(near)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the files."""
    options = parsed(arguments)
    check_operation(options.op)
    made = files(options)
    tests = options.tests / "backends" if (options.tests / "backends").is_dir() else options.tests
    places = {name: options.package / "backends" / "contrib" / options.name / name for name in made}
    places["test"] = tests / f"test_backend_{options.name}.py"
    registry = options.package / "backends" / "__init__.py"
    line = with_line(registry.read_text(encoding="utf-8"), options.name)
    for name, place in places.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(made[name], encoding="utf-8")
        print(f"wrote {place}")
    registry.write_text(line, encoding="utf-8")
    print(f"added a line to {registry}")
    print(f"next: fill in adapter.py and capabilities.json, run 'make schemas' and 'pytest {places['test']}'")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "python"))
    main()
