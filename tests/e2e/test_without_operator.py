"""Engine, Valkey and gateway by plain manifests: the images run, find each other, and answer."""

from __future__ import annotations

import openai
import pytest
from real_cluster import ROOT, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_plain_manifests_answer_a_chat_through_the_gateway(cluster: Cluster) -> None:
    with cluster.namespace("by-hand") as namespace:
        namespace.apply((ROOT / "manifests" / "samples" / "without-operator.yaml").read_text())
        for name in ("by-hand-valkey", "by-hand-gateway", "by-hand-engine"):
            print(f"{name} ready after {namespace.rolled_out(name, 300):.1f} s more")

        client = openai.OpenAI(base_url=namespace.node_port("by-hand-gateway") + "/v1", api_key="none")
        # The name that the pod reports: until its first report is read, the service has that of its Service.
        namespace.until(
            "the gateway names the model", lambda: [one.id for one in client.models.list()] == ["smollm2"]
        )
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=16,
            temperature=0,
        )
        print(answer.choices[0].message.content)
        assert "Paris" in (answer.choices[0].message.content or "")

        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                max_tokens=16,
                temperature=0,
                stream=True,
            )
            if chunk.choices
        ]
        assert len(pieces) > 3, "a stream comes in pieces"
        assert "".join(pieces) == answer.choices[0].message.content
