#!/usr/bin/env bash
# Installs the clients of requirements.txt and package.json into a folder of their own, again only when one of the
# two has changed:
#
#     install.sh FOLDER [PYTHON]
#
# Where that fails, FOLDER/failed has the reason, which the tests print; the exit status is 0 all the same. If npm
# cannot reach its registry, FOLDER/unreachable says so too.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$1 python=${2:-python3}
wanted=$(cat "$here/requirements.txt" "$here/package.json" "${BASH_SOURCE[0]}" | sha256sum)
[ "$(cat "$folder/installed" 2>/dev/null)" != "$wanted" ] || exit 0

install() {
  rm -rf "$folder" && mkdir -p "$folder" && cp "$here/package.json" "$folder" &&
    "$python" -m venv "$folder/venv" &&
    # Node first, so that npm can work while pip does. Modules are compiled when they are imported.
    "${pip[@]}" "$(grep ^nodejs "$here/requirements.txt")" || return
  (cd "$folder" && npm install --silent --no-audit --no-fund --no-package-lock) & npm=$!
  "${pip[@]}" -r "$here/requirements.txt" && code=0 || code=1
  wait "$npm" && [ "$code" = 0 ] || return
  # What npm's scripts put in place are binaries for this machine.
  for client in claude codex opencode; do HOME=$folder/home "$folder/node_modules/.bin/$client" --version || return; done
}
pip=("$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
export PATH=$folder/venv/bin:$PATH npm_config_fetch_retries=1 npm_config_fetch_timeout=120000
if log=$(install 2>&1); then
  echo "$wanted" >"$folder/installed"
else
  mkdir -p "$folder" && echo "$log" | tail -20 >"$folder/failed"
  npm view npm version >/dev/null 2>&1 || touch "$folder/unreachable"
  echo "The clients of tests/clients cannot be installed, their tests will not run:" >&2
  cat "$folder/failed" >&2
fi
exit 0
