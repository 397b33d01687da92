#!/usr/bin/env bash
# Builds the CPU image from a wheel and uses it; where there is no builder, runs the same steps in a clean root.
#
#   check_container.sh [WHEEL]          the newest one in dist/ by default
#
# One of these, the first that works here; the last line says which:
#   docker, podman  the image is built
#   chroot          as root: a new Debian of the image's release (debootstrap), and containers/install.sh inside
#   prefix          containers/install.sh into an empty folder, with this machine's Python and an empty environment
# BUILDER=docker|podman|chroot|prefix chooses one. TORCH_INDEX replaces the Dockerfile's.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheel=${1:-$(find "$root/dist" -name '*.whl' -printf '%T@ %p\n' 2>/dev/null | sort -rn | head -1 | cut -d' ' -f2-)}
[ -f "$wheel" ] || { echo "$0: there is no wheel ${wheel:-in dist/}; build one with \`make wheel\`" >&2; exit 2; }
dockerfile=$root/containers/cpu.Dockerfile
release=$(sed -nE 's/^FROM debian:([a-z]+)-slim$/\1/p' "$dockerfile")
torch=$(sed -n 's/^torch==//p' "$root/containers/cpu.txt")
index=${TORCH_INDEX-$(sed -n 's/^ARG TORCH_INDEX=//p' "$dockerfile")}
if [ -n "$index" ] && ! curl --silent --fail --head --max-time 20 "$index/torch/" >/dev/null; then
  echo "$index cannot be reached from here: torch comes from PyPI, with CUDA's libraries."
  index=
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/context"
# The Dockerfile's context, with exactly one wheel.
mkdir "$folder/context/dist"
cp "$wheel" "$folder/context/dist/"
cp -r "$root/containers" "$folder/context/"
# What is done with the image: every operation against float64.
mkdir "$folder/check"
cp -r "$root/scripts/try_wheel.py" "$root/testdata/ops" "$folder/check/"
chmod -R a+rX "$folder"

in_image() { # in_image docker|podman
  "$1" build --file "$dockerfile" --build-arg "TORCH_INDEX=$index" --tag layerzero:cpu "$folder/context"
  "$1" run --rm layerzero:cpu -c 'import os; assert os.getuid() == 10001, os.getuid()'
  "$1" run --rm --entrypoint layerzero layerzero:cpu ready
  "$1" run --rm layerzero:cpu
  "$1" run --rm --volume "$folder/check:/check:ro" layerzero:cpu /check/try_wheel.py /check/ops "$torch"
}

# The image's ENV, as words for `env`, with $PATH filled in.
environment() {
  sed -n '/^ENV/,/[^\\]$/p' "$dockerfile" | sed -e 's/["\\]//g' -e 's/^ENV//' -e "s#\$PATH#/usr/local/bin:/usr/bin:/bin#" | tr -s ' \n' '\n' | grep .
}

in_chroot() {
  local clean=$folder/root debootstrap=debootstrap
  if ! command -v debootstrap >/dev/null; then
    # A shell script in a package: it works without being installed.
    (cd "$folder" && apt-get download --quiet debootstrap >/dev/null && dpkg-deb --extract debootstrap_*.deb debootstrap)
    export DEBOOTSTRAP_DIR=$folder/debootstrap/usr/share/debootstrap
    debootstrap=$folder/debootstrap/usr/sbin/debootstrap
  fi
  "$debootstrap" --variant=minbase "$release" "$clean" http://deb.debian.org/debian >"$folder/log" 2>&1 || { tail -20 "$folder/log"; return 1; }
  mkdir "$clean/tmp/layerzero"
  cp "$folder"/context/containers/{install.sh,cpu.txt} "$folder"/context/dist/*.whl "$clean/tmp/layerzero/"
  cp -r "$folder/check" "$clean/check"
  # The network of this machine: names, and certificates where it has its own.
  cp /etc/resolv.conf /etc/hosts "$clean/etc/"
  local network=()
  if [ -n "${PIP_CERT:-${SSL_CERT_FILE:-}}" ]; then
    cp "${PIP_CERT:-$SSL_CERT_FILE}" "$clean/tmp/certificates.crt"
    network=(PIP_CERT=/tmp/certificates.crt)
  fi
  mapfile -t variables < <(environment)
  # /proc and /dev are mounted for these processes alone.
  inside() { # inside USER COMMAND...
    local user=$1
    shift
    # shellcheck disable=SC2016 # for the inner shell
    unshare --mount --pid --fork sh -eu -c \
      'mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" && shift && exec chroot "$@"' sh "$clean" "--userspec=$user" "$clean" "$@"
  }
  inside 0:0 /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "TORCH_INDEX=$index" "${network[@]}" \
    /tmp/layerzero/install.sh /tmp/layerzero cpu
  as_user() { inside 10001:10001 /usr/bin/env -i HOME=/home/layerzero "${variables[@]}" "$@"; }
  as_user layerzero ready
  as_user layerzero doctor
  as_user python /check/try_wheel.py /check/ops "$torch"
  as_user python -c '
import os
assert os.getuid() == 10001 and not os.access("/opt/layerzero", os.W_OK), "the user may change the installation"
open(os.environ["XDG_CACHE_HOME"] + "/written", "w").close(), open(os.environ["XDG_STATE_HOME"] + "/written", "w").close()'
}

in_prefix() {
  local prefix=$folder/prefix
  mkdir "$prefix" "$folder/steps"
  cp "$folder"/context/containers/{install.sh,cpu.txt} "$folder"/context/dist/*.whl "$folder/steps/"
  local clean=(env -i "PATH=$PATH" "HOME=$prefix" "XDG_CACHE_HOME=$prefix/var/cache/layerzero" "XDG_STATE_HOME=$prefix/var/lib/layerzero")
  [ -z "${PIP_CERT:-}" ] || clean+=("PIP_CERT=$PIP_CERT")
  cd "$prefix"
  "${clean[@]}" "PREFIX=$prefix" "TORCH_INDEX=$index" "$folder/steps/install.sh" "$folder/steps" cpu
  "${clean[@]}" "$prefix/opt/layerzero/bin/layerzero" ready
  "${clean[@]}" "$prefix/opt/layerzero/bin/layerzero" doctor
  "${clean[@]}" "$prefix/opt/layerzero/bin/python" "$folder/check/try_wheel.py" "$folder/check/ops" "$torch"
}

if [ -z "${BUILDER:-}" ]; then
  if command -v docker >/dev/null && docker info >/dev/null 2>&1; then
    BUILDER=docker
  elif command -v podman >/dev/null && podman info >/dev/null 2>&1; then
    BUILDER=podman
  elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && unshare --mount true 2>/dev/null; then
    BUILDER=chroot
  else
    BUILDER=prefix
  fi
fi
# No `&&` after these: in a condition, a step that fails would not end the script.
case $BUILDER in
  docker | podman)
    in_image "$BUILDER"
    echo "ok: the image layerzero:cpu, built by $BUILDER"
    ;;
  chroot)
    in_chroot
    echo "ok: no builder works here; the steps of the image ran in a new Debian $release (chroot)"
    ;;
  prefix)
    in_prefix
    echo "ok: no builder works here, nor a new root; the steps of the image ran in an empty prefix, with this machine's Python"
    ;;
  *)
    echo "$0: BUILDER is docker, podman, chroot or prefix, not $BUILDER" >&2
    exit 2
    ;;
esac
