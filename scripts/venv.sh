#!/usr/bin/env bash
# Makes the environment VENV of what the file LOCK pins with the tool UV, unless another process just did. Clones share it.
set -euo pipefail
venv=$1 uv=$2 lock=$3
[ -e "$venv/.ready" ] && exit 0
echo "Making the Python environment in $venv: $(grep -c == "$lock") packages of $lock."
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check "$uv"
# Python keeps the bytecode of what it imports, unless it is told not to: then `import torch` would compile it in every process.
bytecode=${PYTHONDONTWRITEBYTECODE:+--compile-bytecode}
"$venv/bin/uv" pip sync $bytecode --python "$venv/bin/python" <(cat "$lock"; echo "$uv")
touch "$venv/.ready"
