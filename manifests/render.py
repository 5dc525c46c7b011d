"""Writes what is made from something else: the chart's copy of the CRD, and leadline.yaml out of the chart.

    python manifests/render.py             write both; needs helm on PATH
    python manifests/render.py --print     leadline.yaml to standard output

`kubectl apply -k manifests` then gives what `helm install leadline charts/leadline -n leadline-system` does,
but for the password: the chart makes one up, here it stands in redis.env.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "leadline"
HEAD = "# Made from charts/leadline by manifests/render.py; do not edit.\n"


def render(helm: str = "helm") -> str:
    """The chart's objects without its Secret (kustomization.yaml makes one) and without helm's own labels."""
    done = subprocess.run(
        [
            helm,
            "template",
            "leadline",
            str(CHART),
            "-n",
            "leadline-system",
            "--skip-tests",
            "--set",
            "crds.install=false",
        ],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "KUBECONFIG": "/dev/null"},
    )
    documents = [one for one in yaml.safe_load_all(done.stdout) if one and one["kind"] != "Secret"]
    for document in documents:
        template = document.get("spec", {}).get("template", {})
        for metadata in (document["metadata"], template.get("metadata", {})):
            labels = metadata.get("labels", {})
            labels.pop("app.kubernetes.io/managed-by", None)
            labels.pop("helm.sh/chart", None)
    return HEAD + yaml.safe_dump_all(documents, sort_keys=False, width=120)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write manifests/leadline.yaml and the chart's CRD.")
    parser.add_argument("--print", action="store_true", dest="to_stdout", help="write to standard output")
    args = parser.parse_args()
    helm = shutil.which("helm")
    if helm is None:
        print("helm is not on PATH", file=sys.stderr)
        return 1
    if args.to_stdout:
        sys.stdout.write(render(helm))
        return 0
    shutil.copyfile(ROOT / "manifests" / "crd.yaml", CHART / "files" / "crd.yaml")
    (ROOT / "manifests" / "leadline.yaml").write_text(render(helm))
    return 0


if __name__ == "__main__":
    sys.exit(main())
