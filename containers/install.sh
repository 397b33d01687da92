#!/bin/sh
# What every image does, in one place: Python, the pinned libraries, the wheel, a user without rights, its folders.
#
#   install.sh FOLDER IMAGE
#
# FOLDER has the wheel and IMAGE.txt, the pins. Runs as root in a Debian or Ubuntu, in an image that is being built or in a root
# made by scripts/check_container.sh. TORCH_INDEX is the index torch comes from; PyPI if empty.
set -eu
folder=$1 image=$2
wheel=$(find "$folder" -maxdepth 1 -name '*.whl')
case $wheel in
'' | *.whl?*.whl) echo "install.sh: one wheel is needed in $folder, there are: ${wheel:-none}" >&2; exit 1 ;;
esac

# Triton compiles a small C file for each launcher: a compiler and Python's headers are needed at run time.
packages='python3 python3-venv ca-certificates'
[ "$image" = cpu ] || packages="$packages gcc libc6-dev python3-dev"
export DEBIAN_FRONTEND=noninteractive
apt-get update
# shellcheck disable=SC2086 # a list of names
apt-get install --yes --no-install-recommends $packages
rm -rf /var/lib/apt/lists/*

python3 -m venv /opt/layerzero
pip='/opt/layerzero/bin/pip install --no-cache-dir --disable-pip-version-check'
# torch first, by itself, so that everything after it meets the build for this hardware.
torch=$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' "$folder/$image.txt")
# shellcheck disable=SC2086 # a command and its options
$pip --constraint "$folder/$image.txt" ${TORCH_INDEX:+--index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple} "$torch"
# shellcheck disable=SC2086
$pip --requirement "$folder/$image.txt" "$wheel"
/opt/layerzero/bin/pip check

# Nothing runs as root. Measurements, compiled kernels and open breakers live in two folders: mount volumes there to keep them.
groupadd --gid 10001 layerzero
useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin layerzero
mkdir -p /var/cache/layerzero /var/lib/layerzero
chown layerzero:layerzero /var/cache/layerzero /var/lib/layerzero
