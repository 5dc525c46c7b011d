"""`leadline serve --tensor-parallel 3`: answers, and the end of one rank is the end of the server."""

from __future__ import annotations

import psutil
from live_server import serving


def test_a_server_over_three_ranks_answers_and_a_killed_rank_ends_it(rig, tokenizer, local):
    from leadline.engine.sampling_params import SamplingParams

    prompt = "The capital of France is"
    greedy = SamplingParams(temperature=0, max_tokens=6)
    (expected,) = rig.run(rig.core(), [tokenizer.encode(prompt)], greedy)
    with serving(local.path, "--served-name=m", "--tensor-parallel=3") as server:
        answer = server.client.completions.create(
            model="m", prompt=prompt, max_tokens=6, temperature=0, stream=False
        )
        assert answer.choices[0].text == tokenizer.decode(expected)
        ranks = server.core().children()
        assert len(ranks) == 2
        ranks[0].kill()
        assert server.process.wait(15) == 1
        assert "rank" in server.log
        assert "was killed by SIGKILL" in server.log
        assert "Traceback" not in server.log
        assert not psutil.wait_procs(ranks, timeout=5)[1]
