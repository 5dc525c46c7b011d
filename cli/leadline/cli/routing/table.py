"""The numbers of one policy, and all of them as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from leadline.cli.http import ServerError
from leadline.cli.routing.conversations import Turn
from leadline.cli.routing.own_time import Times, mean_seconds

__all__ = ["Run", "show", "summary"]

_SHARES = {"p50": 0.5, "p90": 0.9}


@dataclass(slots=True)
class Run:
    """One policy in one round."""

    turns: list[Turn]
    seconds: float
    cpu_seconds: float
    """Of all engines."""
    client_cpu_seconds: float
    """Of this process, which is the load generator."""
    times: tuple[Times, Times]
    """The servers' own times, before and after."""


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Of all rounds of one policy. Seconds, and tokens by the engines' count. Raises ServerError when no
    request was answered."""
    turns = [turn for one in runs for turn in one.turns]
    good = [turn for turn in turns if turn.error is None]
    if not good:
        raise ServerError(f"no request was answered: {turns[0].error}")
    seconds = sum(one.seconds for one in runs)
    prompt = sum(turn.prompt_tokens for turn in good)
    output = sum(turn.output_tokens for turn in good)
    pods = [turn.pod for turn in good]
    return {
        "requests": len(turns),
        "failed": len(turns) - len(good),
        "errors": sorted({turn.error for turn in turns if turn.error is not None}),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "hit_rate": sum(turn.cached_tokens for turn in good) / prompt,
        "ttft_seconds": _spread([turn.ttft for turn in good]),
        "first_turn_ttft_seconds": _spread([turn.ttft for turn in good if turn.number == 0]),
        "later_turn_ttft_seconds": _spread([turn.ttft for turn in good if turn.number > 0]),
        "mean_ttft_seconds_by": {
            "client": sum(turn.ttft for turn in good) / len(good),
            **mean_seconds([one.times for one in runs]),
        },
        "requests_per_second": len(good) / seconds,
        "tokens_per_second": (prompt + output) / seconds,
        "output_tokens_per_second": output / seconds,
        "requests_by_pod": {pod: pods.count(pod) for pod in sorted(set(pods))},
        "engine_cpu_seconds_per_request": sum(one.cpu_seconds for one in runs) / len(turns),
        "client_cores": sum(one.client_cpu_seconds for one in runs) / seconds,
        "round_seconds": [one.seconds for one in runs],
    }


def _spread(values: list[float]) -> dict[str, float]:
    """Mean, and percentiles by nearest rank."""
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p90": 0.0}
    ordered = sorted(values)
    at = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in _SHARES.items()}
    return {"mean": sum(ordered) / len(ordered), **at}


def show(result: dict[str, Any]) -> None:
    """Print it. `result`: what `measure` returned."""
    workload, rows = result["workload"], result["policies"]
    base_name, base = next(iter(rows.items()))
    print(
        f"\n{result['model']} × {result['replicas']}; {result['rounds']} × {workload['conversations']} "
        f"conversations of {workload['turns']} turns over {workload['systems']} system prompts, "
        f"{workload['clients']} at a time; {base['prompt_tokens'] / base['requests']:.0f} prompt tokens and "
        f"{workload['output_tokens']} output tokens a request.\n"
        f"{result['ceiling_hit_rate']:.1%} of the prompt tokens were sent before: no policy can hit more.\n"
    )
    print(
        f"{'policy':<12}{'hit rate':>9}{'TTFT mean':>12}{'p50':>10}{'p90':>10}{'requests/s':>12}"
        f"{'tokens/s':>10}{'output':>9}{'CPU s/request':>15}"
    )
    for policy, row in rows.items():
        ttft = row["ttft_seconds"]
        times = "".join(
            f"{ttft[key] * 1000:>{width}.0f} ms" for key, width in (("mean", 9), ("p50", 7), ("p90", 7))
        )
        print(
            f"{policy:<12}{row['hit_rate']:>9.1%}{times}"
            f"{row['requests_per_second']:>12.2f}{row['tokens_per_second']:>10.0f}"
            f"{row['output_tokens_per_second']:>9.0f}{row['engine_cpu_seconds_per_request']:>15.3f}"
        )
        for error in row["errors"]:
            print(f"  failed: {error}")
    print(
        "\nWhere the mean TTFT is spent. Queue: in the gateway, while engines are full. Gateway: what it\n"
        "measures beyond that and the engine's time. Routing: of that, tokenizing, matching and picking.\n"
        "Rest: connecting, and what waits in sockets.\n"
    )
    print(f"{'policy':<12}{'engine':>12}{'queue':>12}{'gateway':>12}{'share':>8}{'routing':>12}{'rest':>12}")
    for policy, row in rows.items():
        by = row["mean_ttft_seconds_by"]
        print(
            f"{policy:<12}{_ms(by['engine'])}{_ms(by['queue'])}{_ms(by['gateway_own'])}"
            f"{by['gateway_own'] / by['client']:>8.1%}{_ms(by['routing'])}{_ms(by['client'] - by['gateway'])}"
        )
    busiest = max(row["client_cores"] for row in rows.values())
    print(f"\nThe clients took {busiest:.0%} of a core at most.")
    for policy, row in list(rows.items())[1:]:
        ttft = row["ttft_seconds"]["mean"] / base["ttft_seconds"]["mean"]
        rate = row["requests_per_second"] / base["requests_per_second"]
        print(f"\n{policy} over {base_name}: mean TTFT × {ttft:.2f}, requests/s × {rate:.2f}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:>9.2f} ms"
