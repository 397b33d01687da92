#!/usr/bin/env bash
# Makes the development environment VENV with the tool UV, unless another process just did. It is shared between clones.
set -euo pipefail
venv=$1 uv=$2
[ -e "$venv/.ready" ] && exit 0
echo "Making the Python environment in $venv: $(grep -c == requirements-dev.txt) packages, torch among them."
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check "$uv"
"$venv/bin/uv" pip sync --python "$venv/bin/python" <(cat requirements-dev.txt; echo "$uv")
touch "$venv/.ready"
