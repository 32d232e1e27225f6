#!/usr/bin/env bash
# check_breaking.sh BUF: protos against the last release tag; before the first tag there is nothing to break.
set -euo pipefail
buf=${1:?the buf binary}
tag=$(git describe --tags --abbrev=0 --match 'v[0-9]*' 2>/dev/null || true)
if [[ -z $tag ]]; then
  echo "buf breaking: no release tag yet"
  exit 0
fi
exec "$buf" breaking --against ".git#tag=$tag"
