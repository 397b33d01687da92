"""Uses an installed LayerZero as a user would: calls every operation, and compares with the results in testdata/ops.

    python try_wheel.py TESTDATA [TORCH]

TESTDATA is the folder `testdata/ops`, whose results were computed in float64 by numpy. TORCH is the version of torch that
must serve calls on tensors, or nothing where only arrays are tried. Prints one line; raises what goes wrong. Needs numpy.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import layerzero as lz
import numpy as np

#: The function for an operation: the first entry whose parts are all in its id.
FUNCTIONS = (
    ("attention.cross", "cross_attention"),
    ("attention.mla", "mla_attention"),
    ("attention.sparse", "sparse_attention"),
    ("attention.lse.varlen", "varlen_attention_lse"),
    ("attention.lse.paged", "paged_attention_lse"),
    ("attention.lse", "attention_lse"),
    ("attention.merge", "merge_states"),
    ("varlen", "varlen_attention"),
    ("paged", "paged_attention"),
    ("attention", "attention"),
    ("activation.gelu", "gelu"),
    ("activation.softmax", "softmax"),
    ("activation.silu_mul", "silu_mul"),
    ("dequantize", "dequantize"),
    ("quantize", "quantize"),
    ("embedding", "embedding"),
    ("kv_cache.append", "kv_append"),
    ("kv_cache.compact", "kv_compact"),
    ("mlp.fused", "fused_mlp"),
    ("mlp.linear.packed", "linear_packed"),
    ("mlp.linear.quantized", "linear_quantized"),
    ("mlp.linear", "linear"),
    ("norm.fused_add_rms", "fused_add_rms_norm"),
    ("norm.layer", "layer_norm"),
    ("norm.rms", "rms_norm"),
    ("posenc.alibi", "alibi_bias"),
    ("posenc.rope", "rope"),
    ("sampling.speculative", "speculative_verify"),
    ("sampling.topk", "sample_topk"),
    ("sampling.topp", "sample_topp"),
)
#: Inputs that a function calls otherwise than the operation.
RENAMED = {"ckv_cache": "ckv", "kpe_cache": "kpe"}
#: Dtypes that numpy has; and the largest difference from the exact result, relative to max(1, |result|).
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "int64": 0.0, "int32": 0.0, "int8": 0.0, "uint8": 0.0, "bool": 0.0}
#: Kernels may be compiled for each kind of call: a few cases of each operation say whether it works.
CASES_PER_DTYPE = 2

Array = np.ndarray[Any, np.dtype[Any]]


def main(folder: Path, torch_version: str | None) -> None:
    """Calls every operation on numpy arrays, and on torch's tensors where a version of torch is given."""
    files = sorted(folder.glob("*.json"))
    assert files, f"no test data in {folder}"
    torch: Any = None
    if torch_version:
        torch = importlib.import_module("torch")
        assert torch.__version__.split("+")[0] == torch_version.split("+")[0], torch.__version__
    calls = 0
    for file in files:
        document = json.loads(file.read_text())
        cases = _usable(document["cases"])
        assert cases, f"{document['op']}: no case that numpy can hold"
        for case in cases:
            _compare(document["op"], case, None)
            if torch:
                _compare(document["op"], case, torch)
            calls += 2 if torch else 1
    if torch:
        q = torch.randn(1, 16, 2, 16)
        kernel = lz.which("attention", q, q, q).kernel_id
        assert kernel.startswith("torch."), f"torch does not serve attention, but {kernel}"
        compiled = torch.compile(lz.rms_norm, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q), lz.rms_norm(q))
    print(f"layerzero {lz.__version__}: {len(files)} operations, {calls} calls right")


def _usable(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Up to `CASES_PER_DTYPE` cases for each dtype of the first input, with contiguous tensors that numpy has."""
    found: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        tensors = [*case["inputs"].values(), *case.get("expect", {}).values()]
        fits = all(one["dtype"] in TOLERANCES and "strides" not in one for one in tensors)
        if "expect" in case and fits:
            found.setdefault(next(iter(case["inputs"].values()))["dtype"], []).append(case)
    return [case for of_dtype in found.values() for case in of_dtype[:CASES_PER_DTYPE]]


def _array(tensor: dict[str, Any]) -> Array:
    return np.array([float(x) for x in tensor["data"]]).astype(tensor["dtype"]).reshape(tensor["shape"])


def _compare(op: str, case: dict[str, Any], torch: Any) -> None:
    """Makes the call of a case, and compares each result and each updated input."""
    function = next(name for part, name in FUNCTIONS if part in op)
    inputs: dict[str, Any] = {name: _array(tensor) for name, tensor in case["inputs"].items()}
    if torch:
        inputs = {name: torch.from_numpy(array) for name, array in inputs.items()}
    options = {**case["params"], **({"layout": case["layout"]} if case["layout"] else {})}
    results = getattr(lz, function)(**{RENAMED.get(name, name): value for name, value in inputs.items()}, **options)
    results = results if isinstance(results, tuple) else () if results is None else (results,)
    expected = case["expect"]
    updated = [inputs[name] for name in expected if name in inputs]
    for (name, right), result in zip(expected.items(), [*results, *updated], strict=True):
        got = np.asarray(result)
        where = f"{op}, {case['name']}, {'torch' if torch else 'numpy'}: {name}"
        assert list(got.shape) == right["shape"], f"{where} has the shape {got.shape}, not {right['shape']}"
        exact = np.array([float(x) for x in right["data"]]).reshape(right["shape"])
        tolerance = 0.0 if right.get("exact") else TOLERANCES[right["dtype"]]
        limit = tolerance * np.maximum(1.0, np.abs(np.where(np.isfinite(exact), exact, 0.0)))
        with np.errstate(invalid="ignore"):
            near = np.abs(got.astype(np.float64) - exact) <= limit
        same = near | (got == exact) | (np.isnan(exact) & np.isnan(got))
        assert same.all(), f"{where} is wrong at {int((~same).sum())} of {same.size} places"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
