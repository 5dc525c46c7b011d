#!/bin/bash
# load.sh CLUSTER_DIR | kind [NAME]: build the images the cluster tests run, as leadline/NAME:dev, and load them.
#   CLUSTER_DIR  of ../shared/cluster/up.sh: buildah, no registry
#   kind [NAME]  docker, then `kind load` into the kind cluster of that name
# ONLY="gateway operator" builds these alone. BUILD_ARGS holds further options for every build, ENGINE_ARGS for the engine's,
# such as --build-arg PIP_EXTRA_INDEX_URL=… for a CPU torch.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../../.."
target=${1:?usage: load.sh CLUSTER_DIR, or load.sh kind [NAME]} name=${2:-kind}
shared=${LEADLINE_CLUSTER_TOOLS:-../shared/cluster}

build() { # NAME CONTEXT DOCKERFILE [OPTION...]
  local image=leadline/$1:dev context=$2 file=$3 began=$SECONDS size
  [[ " ${ONLY:-$1} " == *" $1 "* ]] || return 0
  shift 3
  if [ "$target" = kind ]; then
    docker build --quiet --tag "$image" --file "$file" "$@" "$context"
    kind load docker-image --name "$name" "$image"
    size=$(docker image inspect --format '{{.Size}}' "$image" | awk '{printf "%.0f MB", $1 / 1e6}')
  else
    "$shared/build.sh" "$target" "$image" "$context" "$file" "$@"
    size=$(STORAGE_DRIVER=overlay buildah images --format '{{.Size}}' "localhost/$image")
  fi
  echo "$image: $size, built and loaded in $((SECONDS - began)) s"
}

empty=$(mktemp -d); trap 'rmdir "$empty"' EXIT
# shellcheck disable=SC2086  # the options are words
{
  build valkey "$empty" tests/e2e/images/valkey.Dockerfile ${BUILD_ARGS:-}
  build operator . operator/Dockerfile ${BUILD_ARGS:-}
  build gateway . gateway/Dockerfile ${BUILD_ARGS:-}
  build engine . engine/Dockerfile ${BUILD_ARGS:-} ${ENGINE_ARGS:-}
}
