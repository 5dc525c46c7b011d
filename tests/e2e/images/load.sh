#!/bin/bash
# load.sh CLUSTER_DIR | kind [NAME]: build the images the cluster tests run, as leadline/NAME:dev, and load them.
#   CLUSTER_DIR  of ../shared/cluster/up.sh: buildah, no registry
#   kind [NAME]  docker, then `kind load` into the kind cluster of that name
# ENGINE_ARGS holds further options for the engine's build, such as --build-arg PIP_EXTRA_INDEX_URL=… for a CPU torch.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../../.."
target=${1:?usage: load.sh CLUSTER_DIR, or load.sh kind [NAME]} name=${2:-kind}

build() { # IMAGE CONTEXT DOCKERFILE [OPTION...]
  local image=leadline/$1:dev context=$2 file=$3; shift 3
  if [ "$target" = kind ]; then
    docker build --quiet --tag "$image" --file "$file" "$@" "$context"
    kind load docker-image --name "$name" "$image"
  else
    ../shared/cluster/build.sh "$target" "$image" "$context" "$file" "$@"
  fi
}

empty=$(mktemp -d); trap 'rmdir "$empty"' EXIT
build valkey "$empty" tests/e2e/images/valkey.Dockerfile
build gateway . gateway/Dockerfile
build operator . operator/Dockerfile
build engine . engine/Dockerfile ${ENGINE_ARGS:-}
