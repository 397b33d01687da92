"""Who serves a call before anything was measured: the order that is declared, held against the H200's published table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import described
import pytest

TABLE = Path(__file__).parents[2] / "testdata" / "h200-table.json"
LIBRARIES = {"torch_cuda": "2.11.0", "triton": "3.6.0", "flashinfer": "0.7.2", "flash_attn_3": "3.0.0"}
#: How many times the best a choice that was not measured may take, and how many times the baseline.
WORST, SLOWER = 2.0, 1.12
#: Where torch has a kernel of its own that needs one launch, that goes first until times are known.
PLAIN = ("rms_norm", "layer_norm", "gelu")


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with ExitStack() as stack:
        for backend, version in LIBRARIES.items():
            stack.enter_context(described.registered(backend, version))
        yield


def arguments(row: dict[str, Any]) -> list[str]:
    """The command that explains the choice for a call of the table, on a described device: nothing was measured on that."""
    call = row["call"]
    arguments = ["explain", "--json", "--device", "h200", "--op", call["op"]]
    arguments += ["--capturing"] if row["mode"] == "graph" else []
    arguments += ["--layout", call["layout"]] if "layout" in call else []
    for name, tensor in call["tensors"].items():
        arguments += [
            f"--shape={name}={'x'.join(map(str, tensor['shape']))}",
            f"--input-dtype={name}={tensor['dtype']}",
        ]
        if "strides" in tensor:
            arguments.append(f"--strides={name}={'x'.join(map(str, tensor['strides']))}")
    for name, value in call.get("params", {}).items():
        arguments.append(f"--param={name}={value}")
    return arguments


@pytest.mark.parametrize("family", ["paged", "gelu", "rms_norm", "layer_norm", "silu_mul", "rope", "topp"])
def test_what_goes_first_is_never_far_behind(family: str) -> None:
    rows = [row for row in json.loads(TABLE.read_text())["rows"] if row["family"] == family]
    assert rows
    for row in rows:
        kernel, times = str(json.loads(described.command(*arguments(row)))["chosen"]), row["candidates"]
        where = f"{row['shape']} {row['mode']}: {kernel} of {times}"
        assert kernel in times, where
        assert family in PLAIN or times[kernel] <= WORST * row["best_us"], where
        assert times[kernel] <= SLOWER * row["default_us"], where


@pytest.mark.parametrize("family", ["bool", "bfloat16"])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_who_goes_first_under_a_mask(family: str, graph: bool) -> None:
    """Padding of BERT and the bias of T5: our kernel that reads the mask as it lies; of torch's kernels its own choice."""
    shape = "16x1x1x512" if family == "bool" else "1x12x512x512"
    words = ["explain", "--json", "--device", "h200", "--op", "attention", "--layout", "BHSD", "--param=causal=false"]
    for name in ("query", "key", "value"):
        words += [f"--shape={name}=16x12x512x64", f"--input-dtype={name}=bfloat16"]
    words += [f"--shape=attn_mask={shape}", f"--input-dtype=attn_mask={family}"]
    answer = json.loads(described.command(*words, *(["--capturing"] if graph else [])))
    ranked = sorted((c for c in answer["candidates"] if c["accepted"]), key=lambda c: c["rank"])
    assert answer["chosen"] == ranked[0]["kernel_id"] == "triton.attention.masked"
    assert next(c["kernel_id"] for c in ranked if c["backend"] == "torch_cuda") == "torch.cuda.sdpa.literal"
