#!/usr/bin/env bash
# Makes .venv, the environment of this clone: the packages of the shared environment VENV, LayerZero from this tree, and the
# command `layerzero`. It takes a second and holds no package itself.
set -euo pipefail
venv=$1
if [ ! -x .venv/bin/python ] || [ -L .venv ]; then
  rm -rf .venv
  "$venv/bin/python" -m venv --without-pip .venv
fi
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
own=$(packages .venv)
# A folder that is only put on the path would not have its own .pth files read.
echo "import site; site.addsitedir('$(packages "$venv")')" > "$own/shared.pth"
echo "$PWD/python" > "$own/layerzero.pth"
cat > .venv/bin/layerzero <<'COMMAND'
#!/bin/sh
exec "$(dirname "$0")/python" -m layerzero "$@"
COMMAND
chmod +x .venv/bin/layerzero
