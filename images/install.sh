#!/bin/sh
# install.sh: what the build stage of each of our images does. /opt/leadline is what the image takes over from it; pip
# stays behind in an environment of its own.
#
#   install.sh package NAME==VERSION    a package and what it depends on (torch, which has a layer of its own)
#   install.sh file NAME==VERSION       a package alone, for the files in it
#   install.sh dependencies EXTRA       what pyproject.toml names for the extra, in the versions of constraints.txt
#   install.sh sources                  our own code out of the working directory, without dependencies
#
# A layer for each: a change of our sources installs nothing else again.
set -eu
hatchling=hatchling==1.33.0 # what builds our wheel, pinned like all the rest

export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_PYTHON=/opt/leadline/bin/python
[ -d /opt/pip ] || { python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/leadline; }
pip() { /opt/pip/bin/pip "$@"; }

verb=$1
case $verb in
  package) pip install --quiet "$2" ;;
  file) pip install --quiet --no-deps "$2" ;;
  dependencies)
    python3 - "$2" >requirements.txt <<'PYTHON'
import sys, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *project["optional-dependencies"][sys.argv[1]], sep="\n")
PYTHON
    # torch, where it is there already, is of the version asked for, which need not be the one of constraints.txt.
    sed '/^torch==/d' constraints.txt >pins.txt
    pip install --quiet -c pins.txt -r requirements.txt
    # The generated classes of the Kubernetes client: 121 of its 126 MB, loaded on demand, and never by us, who use
    # its dynamic client.
    for part in models api; do
      find /opt/leadline/lib -path "*/kubernetes/*client/$part/*" -type f ! -name '__init__*' -delete
    done
    ;;
  sources)
    echo "$hatchling" >/tmp/build-pins.txt
    PIP_CONSTRAINT=/tmp/build-pins.txt pip install --quiet --no-deps .
    ;;
  *) echo "install.sh: no such verb: $verb" >&2; exit 2 ;;
esac
