#!/usr/bin/env bash
# Makes the environment VENV of what the file LOCK pins with the tool UV, unless another process just did.
set -euo pipefail
venv=$1 uv=$2 lock=$3
[ -e "$venv/.ready" ] && exit 0
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check "$uv"
"$venv/bin/uv" pip sync --quiet --python "$venv/bin/python" <(cat "$lock"; echo "$uv")
touch "$venv/.ready"
