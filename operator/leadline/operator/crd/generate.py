"""The CustomResourceDefinition, made from the types of `leadline.protocol.isvc_types`.

python -m leadline.operator.crd            write manifests/crd.yaml
python -m leadline.operator.crd --check    exit 1 if that file is not what the types say (part of `make lint`)
python -m leadline.operator.crd --print    to standard output
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from leadline.operator.crd.schema import object_schema
from leadline.protocol.isvc import GROUP, KIND, PLURAL, SHORT_NAME, SINGULAR, VERSION
from leadline.protocol.isvc_types import InferenceServiceSpec, InferenceServiceStatus

__all__ = ["crd", "crd_yaml", "main"]

MAX_NAME = 52
"""Names of pods are the service's name, "-engine", and 17 characters more; a label's value holds 63. Longer
pod names are cut by Kubernetes, names of Services are not: 52 + len("-engine") stays under 63."""

_READY = '.status.conditions[?(@.type=="Ready")]'
_COLUMNS = (
    ("Model", "string", ".spec.model"),
    ("Ready", "integer", ".status.readyReplicas"),
    ("Desired", "integer", ".status.desiredReplicas"),
    ("TP", "integer", ".spec.tensorParallel"),
    ("Reason", "string", f"{_READY}.reason"),
    ("URL", "string", ".status.url"),
    ("Age", "date", ".metadata.creationTimestamp"),
)
_WIDE_COLUMNS = (("Message", "string", f"{_READY}.message"),)
"""Shown by `kubectl get isvc -o wide` only."""


def crd() -> dict[str, Any]:
    """The CRD as an object for the API server."""
    schema: dict[str, Any] = {
        "type": "object",
        "description": "A large language model, served by tensor-parallel pods behind the Leadline gateway.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": object_schema(InferenceServiceSpec),
            "status": object_schema(InferenceServiceStatus, defaults=False),
        },
        "x-kubernetes-validations": [
            {
                "rule": f"self.metadata.name.size() <= {MAX_NAME} && "
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "message": f"metadata.name must be at most {MAX_NAME} characters of a-z, 0-9 and -, and "
                "begin with a letter: it becomes the name of a Service (servedName may be anything)",
            }
        ],
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, **({"priority": priority} if priority else {})}
            for priority, columns in enumerate((_COLUMNS, _WIDE_COLUMNS))
            for name, kind, path in columns
        ],
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{GROUP}",
            "labels": {"app.kubernetes.io/name": "leadline", "app.kubernetes.io/part-of": "leadline"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }


class _Dumper(yaml.SafeDumper):
    """No anchors: two equal nodes are two texts."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def crd_yaml() -> str:
    """The text of manifests/crd.yaml."""
    head = "# Made by `python -m leadline.operator.crd` from leadline.protocol.isvc_types; do not edit.\n"
    return head + yaml.dump(crd(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m leadline.operator.crd", description="Make the CRD.")
    parser.add_argument("file", nargs="?", type=Path, default=Path("manifests/crd.yaml"))
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--print", action="store_true", dest="to_stdout", help="write to standard output")
    args = parser.parse_args(argv)
    text = crd_yaml()
    if args.to_stdout:
        sys.stdout.write(text)
    elif not args.check:
        args.file.write_text(text, encoding="utf-8")
    elif not args.file.is_file() or args.file.read_text(encoding="utf-8") != text:
        print(f"{args.file} is not what the types say; run: python -m leadline.operator.crd", file=sys.stderr)
        return 1
    return 0
