#!/usr/bin/env bash
# install.sh BASE_PYTHON VENV: everything into VENV, once per content of pyproject.toml and constraints.txt.
set -euo pipefail
base_python=${1:?a Python 3.11 or newer} venv=${2:?a folder}
stamp=$venv/.installed
want=$(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)
if [[ -f $stamp && $(<"$stamp") == "$want" && -x $venv/bin/python ]]; then
  exit 0
fi
if [[ ! -x $venv/bin/python ]]; then
  "$base_python" -c 'import sys; sys.exit("Shoal needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
  echo "install: creating $venv with $("$base_python" --version)"
  "$base_python" -m venv "$venv"
fi
echo "install: downloading and installing (2.6 GB on disk with torch's CPU build; torch is the large one)"
# --group needs pip 25.1.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
"$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
  --constraint constraints.txt --editable '.[local]' --group dev |
  awk '/^ *(Downloading|Installing|Successfully)/ { print "install: " substr($0, 1, 110); fflush() }'
echo "$want" >"$stamp"
echo "install: done"
