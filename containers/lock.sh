#!/usr/bin/env bash
# Pins what <image>.in asks for, and all it needs, in <image>.txt.
#   lock.sh UV
# Where torch comes from its own index, what its build on PyPI needs is left out: CUDA's libraries, and Triton for them.
set -euo pipefail
uv=$1
cd "$(dirname "$0")"
for image in cpu cuda12 cuda13 rocm; do
  # Debian 13 has Python 3.13, Ubuntu 24.04 has 3.12.
  python=$([ "$image" = cpu ] && echo 3.13 || echo 3.12)
  "$uv" pip compile --quiet --no-header --no-annotate --python-version "$python" --python-platform x86_64-manylinux_2_28 \
    --output-file "$image.all" "$image.in"
  case $image in
    cpu | rocm) grep -vE '^(nvidia-|cuda-|triton==)' "$image.all" >"$image.txt" ;;
    *) cp "$image.all" "$image.txt" ;;
  esac
  rm "$image.all"
done
