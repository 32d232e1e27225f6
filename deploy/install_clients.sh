#!/usr/bin/env bash
# install_clients.sh BASE_PYTHON VENV: the clients of tests/clients into VENV and tests/clients/node_modules, once per content of their lists.
set -euo pipefail
base_python=${1:?a Python 3.11 or newer} venv=${2:?a folder}
here=tests/clients
stamp=$venv/.installed
want=$(cat "$here"/{requirements.txt,constraints.txt,package.json,package-lock.json} | sha256sum | cut -d' ' -f1)
if [[ -f $stamp && $(<"$stamp") == "$want" && -x $venv/bin/python && -d $here/node_modules ]]; then
  exit 0
fi
[[ -x $venv/bin/python ]] || "$base_python" -m venv "$venv"
echo "install-clients: downloading and installing into $venv (2.6 GB on disk with torch's CPU build, which guidellm asks for)"
"$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
  --constraint "$here/constraints.txt" --requirement "$here/requirements.txt" |
  awk '/^ *(Downloading|Installing|Successfully)/ { print "install-clients: " substr($0, 1, 110); fflush() }'
PATH=$PWD/$venv/bin:$PATH "$venv/bin/npm" ci --prefix "$here" --no-audit --no-fund --ignore-scripts
echo "$want" >"$stamp"
echo "install-clients: done"
