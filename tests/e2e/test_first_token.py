"""The commands of docs/install.md, "First token on kind", as they stand on the page.

Needs a cluster without another release that serves all namespaces, and its images (`make images`).
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time

import pytest
from real_cluster import ROOT, Cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        bool(os.environ.get("LEADLINE_E2E_SHARED")),
        reason="LEADLINE_E2E_SHARED is set: the page's release serves all namespaces",
    ),
]

PAGE = (ROOT / "docs" / "install.md").read_text()


def commands() -> list[str]:
    """Of the second block: the first makes cluster and images."""
    part = PAGE.split("\n## First token on kind\n")[1].split("\n## ")[0]
    block = re.findall(r"^```\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)[1]
    return [line for line in block.replace("\\\n", " ").splitlines() if line]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_page_leads_from_images_to_an_answer_and_an_uninstallation_leaves_no_lease(
    cluster: Cluster,
) -> None:
    port, shell = str(free_port()), cluster.environment
    forward: subprocess.Popen[bytes] | None = None
    answer = ""
    try:
        for command in commands():
            began, line = time.monotonic(), command.replace("8080", port)
            if line.endswith("&"):
                forward = subprocess.Popen(line.removesuffix("&").split(), cwd=ROOT, env=shell)
                continue
            done = subprocess.run(
                ["bash", "-c", line], cwd=ROOT, env=shell, capture_output=True, text=True, timeout=400
            )
            pods = cluster.kubectl("get", "pods,isvc", "-A", "-o", "wide", check=False)
            assert done.returncode == 0, (command, done.stderr, pods)
            answer = done.stdout
            print(f"{time.monotonic() - began:5.1f} s  {command[:60]}")
        assert "Paris" in json.loads(answer)["choices"][0]["message"]["content"]
        gateways = json.loads(
            cluster.kubectl(
                *("get", "pods", "-n", "leadline-system", "-o", "json"),
                *("-l", "app.kubernetes.io/component=gateway"),
            )
        )["items"]
        assert len(gateways) == 2
        (engine,) = json.loads(
            cluster.kubectl("get", "pods", "-l", "serving.leadline.io/service=smollm2", "-o", "json")
        )["items"]
        assert engine["status"]["qosClass"] == "Burstable"
        cluster.helm("uninstall", "leadline", "-n", "leadline-system", "--wait", "--timeout", "3m")
        ends = time.monotonic() + 60
        while leases := cluster.kubectl("get", "leases", "-n", "leadline-system", "-o", "name"):
            assert time.monotonic() < ends, leases
            time.sleep(0.5)
    finally:
        if forward is not None:
            forward.kill()
            forward.wait()
        cluster.kubectl("delete", "isvc", "smollm2", "--ignore-not-found", check=False)
        cluster.helm("uninstall", "leadline", "-n", "leadline-system", "--ignore-not-found", check=False)
        cluster.kubectl(
            "delete", "namespace", "leadline-system", "--ignore-not-found", "--wait=false", check=False
        )
