#!/usr/bin/env bash
# Installs the newest wheel in dist/ into a fresh environment of each Python, and uses it there as a user would.
#   check_wheel.sh UV [PYTHON...]          for example: check_wheel.sh .venv/bin/uv 3.11 3.12 3.13
# TORCH="2.10.0 2.11.0" installs each of these versions of torch as well, and calls a kernel of torch's.
set -euo pipefail
uv=$1
shift
wheel=$(ls -t dist/*.whl | head -1)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
smoke='
import sys, numpy as np, layerzero as lz
x = np.linspace(-1.0, 1.0, 8, dtype=np.float32).reshape(2, 4)
expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
assert np.allclose(lz.rms_norm(x, eps=1e-6), expected, atol=1e-6), "a wrong result"
if "torch" in sys.argv[1:]:
    import torch
    q = torch.randn(1, 4, 2, 16)
    right = torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3, is_causal=True).transpose(1, 2)
    assert torch.allclose(lz.attention(q, q, q, causal=True), right, atol=1e-5), "a wrong result"
    assert lz.which("attention", q, q, q)["kernel_id"].startswith("torch."), "torch does not serve"
'
failed=0
for python in "${@:-3.11}"; do
  for torch in none ${TORCH:-}; do
    place="$folder/$python-$torch"
    more=(numpy)
    [ "$torch" = none ] || more+=("torch==$torch")
    if "$uv" venv --quiet --python "$python" "$place" 2>"$folder/why" &&
      "$uv" pip install --quiet --python "$place/bin/python" "$wheel" "${more[@]}" 2>"$folder/why" &&
      (cd "$folder" && "$place/bin/layerzero" --version >"$folder/version" 2>"$folder/why" &&
        "$place/bin/python" -c "$smoke" "$([ "$torch" = none ] || echo torch)" 2>"$folder/why"); then
      echo "ok   Python $python, torch $torch: $(cat "$folder/version")"
    else
      echo "FAIL Python $python, torch $torch: $(tail -1 "$folder/why")"
      failed=1
    fi
  done
done
exit $failed
