#!/usr/bin/env bash
# Pins what <image>.in asks for, and all it needs, in <image>.txt.
#   lock.sh UV
# Where torch comes from its own index, what its build on PyPI needs is left out: CUDA's libraries, and Triton for them.
set -euo pipefail
uv=$1
cd "$(dirname "$0")"
for image in cpu cuda12 cuda13 rocm; do
  # The oldest Python of the package: the pins then serve the images' (3.13 of Debian 13, 3.12 of Ubuntu 24.04) and yours.
  "$uv" pip compile --quiet --no-header --no-annotate --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
    --output-file "$image.all" "$image.in"
  case $image in
    cpu | rocm) grep -vE '^(nvidia-|cuda-|triton==)' "$image.all" >"$image.txt" ;;
    *) cp "$image.all" "$image.txt" ;;
  esac
  rm "$image.all"
done
