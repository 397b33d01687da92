"""Every Python block of README.md and docs/ runs, and prints what the text block after it says; so do the examples.

`LZ_UPDATE_DOCS=1 pytest tests/cli/test_docs.py` writes what the blocks print into the pages.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import layerzero as lz
import pytest
from faults import states
from layerzero.backends import BACKENDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
#: Libraries that a page needs, and that are not part of every environment.
NEEDED = {"diffusers.md": "diffusers"}
PROCESSOR = "Intel(R) Xeon(R) Processor"
"""The processor the pages were written on."""


@dataclass(frozen=True)
class Block:
    """A piece of Python in a page, and where the page says what it prints."""

    code: str
    line: int
    printed: tuple[int, int] | None


def blocks(page: str) -> list[Block]:
    """The Python blocks of a page. A text block that follows one, with nothing between, is what it prints."""
    found, all_blocks = [], list(BLOCK.finditer(page))
    for block, following in zip_longest(all_blocks, all_blocks[1:]):
        if block["kind"] != "python":
            continue
        printed = None
        if following is not None and following["kind"] == "text" and not page[block.end() : following.start()].strip():
            printed = following.span("text")
        found.append(Block(block["text"], page.count("\n", 0, block.start("text")), printed))
    return found


def plain(text: str) -> list[str]:
    """Lines without what differs between machines: versions, the processor and the instruction sets it lacks, free
    memory, other devices, the width of columns. Of a native kernel that is there for several instruction sets, one line.

    Backends that other tests brought along stay in `doctor` for the rest of the process.
    """
    name = lz.doctor(file=io.StringIO()).devices[0]["name"]
    text = re.sub(r"\d+\.\d+(\.\d+)+(\+\w+)?|(?<=Python )[\d.]+", "V", text.replace(name, PROCESSOR))
    # Whether a library was imported depends on what ran before.
    text = text.replace(", not imported yet", "")
    text = re.sub(r"[\d.]+ \wB available", "some memory available", text)
    # Why a native kernel cannot serve a call depends on the CPU too.
    text = re.sub(r"(?m)^lz_cpu\.\S+ \['[A-Z_', ]*'\]\n?", "", text)
    text = re.sub(r"\[INSTRUCTION_SET_MISMATCH\][^;\n]*(; )?|'INSTRUCTION_SET_MISMATCH', ", "", text)
    text = re.sub(r"\d+ kernels for other hardware", "kernels for other hardware", text)
    text = re.sub(r"(?m)^kernels: .*", "kernels", re.sub(r"(?m)^  [1-9]\d*: \w+ .*\n", "", text))
    text = re.sub(r"(lz_cpu\.[\w.]*?)\.(?:avx512_bf16|avx512|avx2|amx)\b", r"\1", text)
    lines: list[str] = []
    for line in text.strip().splitlines():
        words = line.split()
        is_candidate = len(words) > 2 and (words[0].isdigit() or words[0] == "✗") and "." in words[1]
        if is_candidate and words[0].isdigit():
            words[0] = "rank"
        if is_candidate and words[1].startswith("lz_cpu.") and not words[1].startswith("lz_cpu.ref."):
            # Its score, and whether it can run, are those of an instruction set.
            words = ["native", words[1]]
            if " ".join(words) in lines:
                continue
        if line in ("verify off environment", "perfdb.priors False environment"):
            # What the tests themselves say (conftest.py).
            continue
        brought = len(words) > 2 and words[0] in "✓✗" and "." not in words[1]
        if not (brought and words[1] not in (*BACKENDS, "lz_cpu")):
            lines.append(" ".join(words))
    return lines


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_says_what_happens(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.name in NEEDED:
        pytest.importorskip(NEEDED[path.name], reason=f"{NEEDED[path.name]} is not installed")
    monkeypatch.chdir(ROOT)
    # What other tests said in code is not on the page.
    states.fresh()
    page, names = path.read_text(encoding="utf-8"), {"__name__": "__docs__"}
    replaced = page
    for block in blocks(page):
        code = compile("\n" * block.line + block.code, str(path), "exec")
        out = io.StringIO()
        with redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(code, names)  # noqa: S102
        if block.printed is None:
            continue
        said = page[slice(*block.printed)]
        if "LZ_UPDATE_DOCS" in os.environ:
            replaced = replaced.replace(
                block.code + "```\n\n```text\n" + said, block.code + "```\n\n```text\n" + out.getvalue()
            )
        else:
            assert plain(out.getvalue()) == plain(said), f"{path.name}:{block.line}"
    if replaced != page:
        path.write_text(replaced, encoding="utf-8")


def test_pages_link_to_what_is_there() -> None:
    others = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/plugin/README.md", "bench/gpu/README.md")
    for path in (*PAGES, *(ROOT / other for other in others), *(ROOT / "bench" / "results").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_quickstart_tells_its_story() -> None:
    out = io.StringIO()
    with redirect_stdout(out):
        runpy.run_path(str(ROOT / "examples" / "quickstart.py"), run_name="__main__")
    said = out.getvalue()
    for part in ("attention.gqa.prefill", "norm.rms", "sampling.topp", "now chosen: quickstart.rms_norm"):
        assert part in said
    assert "[PARAM_UNSUPPORTED] softcap is 30" in said and "[ATTN_MASK_INVALID]" in said
    assert "quickstart.rms_norm" not in {kernel.kernel_id for kernel in lz.list_kernels()}


def test_the_transformer_learns_and_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["transformer_block.py", "--backend", "aot_eager", "--steps", "12"])
    out = io.StringIO()
    with redirect_stdout(out):
        runpy.run_path(str(ROOT / "examples" / "transformer_block.py"), run_name="__main__")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out.getvalue())]
    assert losses[-1] < losses[0] - 0.2
    (difference,) = re.findall(r"differs by (\S+)", out.getvalue())
    assert float(difference) < 1e-4
