"""Writes the expected results of every tensor operation to ops/, or checks that they are there.

python testdata/generate.py           write
python testdata/generate.py --check   exit with 1 if a file is missing, stale or not ours
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from cases import (
    activation,
    attention,
    call_path,
    embedding,
    kv_cache,
    lse,
    mla,
    mlp,
    norm,
    number,
    paged,
    posenc,
    quantize,
    sampling,
    sparse,
    varlen,
)
from cases.case import Case

FAMILIES = [
    attention,
    varlen,
    paged,
    lse,
    mla,
    sparse,
    embedding,
    posenc,
    norm,
    mlp,
    activation,
    sampling,
    quantize,
    kv_cache,
]

OPS = [
    "attention.standard.prefill",
    "attention.standard.decode",
    "attention.gqa.prefill",
    "attention.gqa.decode",
    "attention.cross.prefill",
    "attention.cross.decode",
    "attention.standard.prefill.varlen",
    "attention.gqa.prefill.varlen",
    "attention.standard.prefill.paged",
    "attention.standard.decode.paged",
    "attention.gqa.prefill.paged",
    "attention.gqa.decode.paged",
    "attention.lse",
    "attention.lse.varlen",
    "attention.lse.paged",
    "attention.merge",
    "attention.mla.prefill",
    "attention.mla.decode",
    "attention.mla.decode.paged",
    "attention.mla.prefill.paged",
    "attention.sparse.block",
    "attention.sparse.variable_block",
    "embedding.lookup",
    "posenc.rope",
    "posenc.alibi",
    "norm.rms",
    "norm.layer",
    "norm.fused_add_rms",
    "mlp.linear",
    "mlp.linear.packed",
    "mlp.linear.quantized",
    "mlp.fused",
    "activation.silu_mul",
    "activation.gelu",
    "activation.softmax",
    "sampling.topk",
    "sampling.topp",
    "sampling.speculative",
    "quantize",
    "dequantize",
    "kv_cache.append",
    "kv_cache.compact",
]

FOLDER = Path(__file__).parent / "ops"


def text_of(op: str, cases: list[Case]) -> str:
    """A file: one case per line, so that diffs can be read."""
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), f"{op}: {sorted(n for n in set(names) if names.count(n) > 1)} twice"
    lines = ",\n".join(case.to_json() for case in cases)
    return f'{{"op": {json.dumps(op)}, "cases": [\n{lines}\n]}}\n'


def files() -> Iterator[tuple[Path, str, int]]:
    """Every file with its text and number of cases."""
    by_op = {op: cases for family in FAMILIES for op, cases in family.CASES.items()}
    assert sorted(by_op) == sorted(OPS), "OPS and the families disagree"
    for op in OPS:
        cases = list(by_op[op]())
        text = text_of(op, cases)
        assert len(json.loads(text)["cases"]) == len(cases)
        yield FOLDER / f"{op}.json", text, len(cases)
    text = call_path.text()
    yield FOLDER.parent / "call_path.json", text, len(json.loads(text)["sequences"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    only_check = parser.parse_args().check

    number.check()
    for family in FAMILIES:
        family.check()

    wrong, size, count = [], 0, 0
    FOLDER.mkdir(exist_ok=True)
    stray = set(FOLDER.glob("*.json"))
    for path, text, cases in files():
        stray.discard(path)
        size, count = size + len(text), count + cases
        if not only_check:
            path.write_bytes(text.encode())
            print(f"{path.stem:36}{cases:5} cases {len(text):8} bytes")
        elif not path.exists() or path.read_bytes() != text.encode():
            wrong.append(path)
    wrong += sorted(stray)
    for path in wrong:
        print(f"{path.relative_to(FOLDER.parent)} differs from what generate.py writes", file=sys.stderr)
    print(f"{len(OPS)} operations, {count} cases, {size} bytes")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
