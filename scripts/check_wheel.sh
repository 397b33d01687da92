#!/usr/bin/env bash
# Installs a wheel into a clean environment for each Python and torch, and uses it there as a user would.
#
#   check_wheel.sh --uv UV [--wheel FILE] [--pythons "3.11 3.12"] [--torches "none 2.10.0 newest"] [--torch-backend cpu]
#                  [--require-all yes]
#
# --wheel    the wheel; by default the newest one in dist/
# --pythons  versions or paths of interpreters; looked for here, or downloaded by uv
# --torches  versions of torch: `none` is numpy alone, `newest` what the index has
# --torch-backend cpu  torch from its own index, built without CUDA: smaller than what PyPI has
#
# --require-all yes  a combination that is not available is a failure too: for machines that must have them all
#
# In each environment: every operation against results in float64 (scripts/try_wheel.py), `layerzero doctor`,
# `layerzero explain`, and a wrong command, which must exit with 2. The table at the end has a line for each combination:
# ok, FAILED, or "not available here" where there is no such interpreter, or no torch for it. Exits with 1 if a combination
# failed, or if none could be tried.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
uv=uv wheel='' pythons='3.11 3.12 3.13 3.14' torches='none 2.10.0 newest' backend=() require_all=no
while [ $# -gt 0 ]; do
  [ $# -gt 1 ] || { echo "$0: $1 needs a value" >&2; exit 2; }
  case $1 in
    --uv) uv=$2 ;;
    --wheel) wheel=$2 ;;
    --pythons) pythons=$2 ;;
    --torches) torches=$2 ;;
    --torch-backend) backend=(--torch-backend "$2") ;;
    --require-all) require_all=$2 ;;
    *) echo "$0: unknown option $1; see the head of this file" >&2; exit 2 ;;
  esac
  shift 2
done
if [ -z "$wheel" ]; then
  wheel=$(find "$root/dist" -name '*.whl' -printf '%T@ %p\n' 2>/dev/null | sort -rn | head -1 | cut -d' ' -f2-)
  [ -n "$wheel" ] || { echo "$0: there is no wheel in dist/; build one with \`make wheel\`, or name one with --wheel" >&2; exit 2; }
fi
[ -f "$wheel" ] || { echo "$0: there is no file $wheel" >&2; exit 2; }
wheel=$(realpath "$wheel")

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# Nothing of the user's or of the checkout: no settings, no caches, no PYTHONPATH.
clean=(env -i "PATH=/usr/bin:/bin" "HOME=$folder/home" "LANG=C.UTF-8" "OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}")
mkdir "$folder/home"

# What a user does after `pip install`. $1: the environment, $2: the version of torch, or nothing.
try() {
  cd "$folder"
  "${clean[@]}" "$1/bin/python" -W error::layerzero.errors.LayerZeroWarning "$root/scripts/try_wheel.py" "$root/testdata/ops" ${2:+"$2"} || return 1
  "${clean[@]}" "$1/bin/layerzero" --version || return 1
  "${clean[@]}" "$1/bin/layerzero" doctor || { echo "layerzero doctor exits with $?"; return 1; }
  "${clean[@]}" "$1/bin/layerzero" explain --op rms_norm --shape input=4x64 || { echo "layerzero explain exits with $?"; return 1; }
  local status=0
  "${clean[@]}" "$1/bin/layerzero" no-such-command || status=$?
  [ "$status" = 2 ] || { echo "a wrong command exits with $status, not with 2"; return 1; }
}

# The interpreter for a version: pyenv's where it has one, since its commands on PATH only work for the chosen version;
# otherwise what uv finds or downloads.
interpreter() {
  local found=''
  if [[ $1 =~ ^[0-9.]+$ ]]; then
    found=$(find "${PYENV_ROOT:-$HOME/.pyenv}/versions" -path "*/versions/$1*/bin/python" 2>/dev/null | sort -V | tail -1)
  fi
  echo "${found:-$1}"
}

rows=() failed=0 tried=0 missing=0
for wanted in $pythons; do
  python=$(interpreter "$wanted")
  if ! "$uv" venv --quiet --python "$python" "$folder/probe" >"$folder/log" 2>&1; then
    rows+=("$wanted|all|not available here|no such interpreter: neither found nor downloaded")
    missing=1
    continue
  fi
  version=$("$folder/probe/bin/python" -c 'import platform; print(platform.python_version())')
  rm -rf "$folder/probe"
  for torch in $torches; do
    place="$folder/environment" result=FAILED detail='' started=$SECONDS
    rm -rf "$place"
    "$uv" venv --quiet --python "$python" "$place"
    packages=(numpy)
    case $torch in
      none) ;;
      newest) packages+=(torch) ;;
      *) packages+=("torch==$torch") ;;
    esac
    # What the wheel is installed beside comes first: a torch the index does not have is no failure of the wheel.
    if ! "$uv" pip install --quiet --python "$place/bin/python" "${backend[@]}" "${packages[@]}" >"$folder/log" 2>&1; then
      rows+=("$version|$torch|not available here|$(tr -s '\n ' ' ' <"$folder/log" | sed -E 's/.*cause: //' | cut -c1-110)")
      missing=1
      continue
    fi
    tried=$((tried + 1))
    have=''
    [ "$torch" = none ] || have=$("$place/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
    if "$uv" pip install --quiet --python "$place/bin/python" "$wheel" >"$folder/log" 2>&1 &&
      (try "$place" "$have") >"$folder/log" 2>&1; then
      result=ok detail="$(grep -m1 'calls right' "$folder/log"), $((SECONDS - started)) s"
    else
      failed=1 detail=$(tail -1 "$folder/log" | cut -c1-160)
      echo "--- Python $version, torch ${have:-none}:" >&2
      tail -30 "$folder/log" >&2
    fi
    rows+=("$version|${have:-none}|$result|$detail")
    echo "Python $version, torch ${have:-none}: $result"
  done
done

echo
basename "$wheel"
printf '%-9s %-16s %-19s %s\n' Python torch result ''
for row in "${rows[@]}"; do
  IFS='|' read -r python torch result detail <<<"$row"
  printf '%-9s %-16s %-19s %s\n' "$python" "$torch" "$result" "$detail"
done
if [ "$tried" = 0 ]; then
  echo "Nothing could be tried: none of these combinations is available here." >&2
  exit 1
fi
if [ "$require_all" = yes ] && [ "$missing" = 1 ]; then
  echo "Some combinations are not available here, and --require-all wants them." >&2
  exit 1
fi
exit $failed
