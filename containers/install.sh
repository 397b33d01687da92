#!/bin/sh
# What every image does, in one place: Python, the pinned libraries, the wheel, a user without rights, its folders.
#
#   install.sh FOLDER IMAGE
#
# FOLDER has the wheel and IMAGE.txt, the pins. Runs as root in a Debian or Ubuntu: in an image that is being built, or in a root
# made by scripts/check_container.sh. TORCH_INDEX is the index torch comes from; PyPI if empty. With PREFIX, the Python of this
# machine is used, and everything goes under that folder: no packages of the system, and no user.
set -eu
folder=$1 image=$2 prefix=${PREFIX:-}
wheel=$(find "$folder" -maxdepth 1 -name '*.whl')
if [ "$(printf '%s' "$wheel" | grep -c .)" != 1 ]; then
  echo "install.sh: one wheel is needed in $folder; there are: ${wheel:-none}" >&2
  exit 1
fi

if [ -z "$prefix" ]; then
  # Triton compiles a small C file for each launcher: a compiler and Python's headers are needed at run time.
  packages='python3 python3-venv ca-certificates'
  [ "$image" = cpu ] || packages="$packages gcc libc6-dev python3-dev"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update
  # shellcheck disable=SC2086 # a list of names
  apt-get install --yes --no-install-recommends $packages
  rm -rf /var/lib/apt/lists/*
fi

python3 -m venv "$prefix/opt/layerzero"
install() {
  "$prefix/opt/layerzero/bin/pip" install --no-cache-dir --disable-pip-version-check --progress-bar off "$@"
}
# torch first, by itself, so that everything after it meets the build for this hardware. A version of torch's own index
# ("2.11.0+cpu") goes before the same one of PyPI.
torch=$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' "$folder/$image.txt")
install --constraint "$folder/$image.txt" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$torch"
install --requirement "$folder/$image.txt" "$wheel"
"$prefix/opt/layerzero/bin/pip" check

# Nothing runs as root. Measurements, compiled kernels and open breakers are in two folders: mount volumes there to keep them.
mkdir -p "$prefix/var/cache/layerzero" "$prefix/var/lib/layerzero"
if [ -z "$prefix" ]; then
  groupadd --gid 10001 layerzero
  useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin layerzero
  chown layerzero:layerzero /var/cache/layerzero /var/lib/layerzero
fi
