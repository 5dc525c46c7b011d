"""The Grafana dashboards of the chart: charts/leadline/dashboards/*.json.

    python charts/dashboards.py            write them
    python charts/dashboards.py --check    fail when a file is not what this makes

One row of a table here is a panel there. Every series is chosen by `service`, `<namespace>/<name>`: gateways
write that label themselves, and the chart's PodMonitor puts it on the engines' series.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from grafana import Dashboard, Panel, render

__all__ = ["DASHBOARDS"]

FOLDER = Path(__file__).parent / "leadline" / "dashboards"
_OWN = 'service=~"$service"'


def _rate(metric: str, by: str = "service", matchers: str = _OWN) -> str:
    chosen = f"{{{matchers}}}" if matchers else ""
    return f"sum by ({by}) (rate({metric}{chosen}[$__rate_interval]))"


def _ratio(part: str, whole: str, by: str = "service") -> str:
    """Of two rates; nothing where the second is 0."""
    return f"{_rate(part, by)} / ({_rate(whole, by)} > 0)"


def _quantiles(metric: str, matchers: str = _OWN, by: str = "service") -> tuple[tuple[str, str], ...]:
    labels = ", ".join(filter(None, ("le", by)))
    legend = f"{{{{{by}}}}} " if by else ""
    return tuple(
        (
            f"{legend}p{round(share * 100)}",
            f"histogram_quantile({share}, {_rate(metric + '_bucket', labels, matchers)})",
        )
        for share in (0.5, 0.95, 0.99)
    )


_G, _E, _O = "leadline_gateway_", "leadline_engine_", "leadline_operator_"
_S, _P = "{{service}}", "{{service}} {{pod}}"

SERVING = Dashboard(
    uid="leadline-serving",
    title="Leadline / Serving",
    about="What clients see: the gateway's requests, times to tokens, queues, and how well it finds caches.",
    services_of=f"{_G}in_flight_requests",
    rows=(
        (
            "Requests",
            (
                Panel(
                    "Requests",
                    "reqps",
                    ((f"{_S} {{{{code}}}}", _rate(f"{_G}requests_total", "service, code")),),
                ),
                Panel(
                    "Failed",
                    "percentunit",
                    (
                        (
                            _S,
                            _rate(f"{_G}requests_total", matchers=f'{_OWN}, code=~"5.."')
                            + f" / ({_rate(f'{_G}requests_total')} > 0)",
                        ),
                    ),
                    "Answers of 5xx. Clients that leave count as 499 and are not in here.",
                ),
                Panel(
                    "In flight and queued",
                    "short",
                    (
                        (f"{_S} in flight", f"sum by (service) ({_G}in_flight_requests{{{_OWN}}})"),
                        (f"{_S} queued", f"sum by (service) ({_G}queued_requests{{{_OWN}}})"),
                    ),
                    "Queued: no pod has free capacity.",
                ),
            ),
        ),
        (
            "Time",
            (
                Panel(
                    "Time to first token",
                    "s",
                    _quantiles(f"{_G}time_to_first_token_seconds"),
                    "Streams only.",
                ),
                Panel("Time between pieces of a stream", "s", _quantiles(f"{_G}inter_token_seconds")),
                Panel("Whole request", "s", _quantiles(f"{_G}request_seconds")),
                Panel("Wait for a pod with free capacity", "s", _quantiles(f"{_G}queue_seconds")),
                Panel(
                    "Routing",
                    "s",
                    _quantiles(f"{_G}routing_seconds"),
                    "Tokenizing, matching and picking: what the gateway adds.",
                ),
                Panel(
                    "Tokens",
                    "short",
                    (
                        (f"{_S} prompt/s", _rate(f"{_G}prompt_tokens_total")),
                        (f"{_S} output/s", _rate(f"{_G}completion_tokens_total")),
                    ),
                    "A second, by the engines' count.",
                ),
            ),
        ),
        (
            "Prefix cache",
            (
                Panel(
                    "Prompt tokens from the cache",
                    "percentunit",
                    ((_S, _ratio(f"{_G}actual_cached_tokens_total", f"{_G}prompt_tokens_total")),),
                ),
                Panel(
                    "Predicted over actual",
                    "percentunit",
                    ((_S, _ratio(f"{_G}predicted_cached_tokens_total", f"{_G}actual_cached_tokens_total")),),
                    "1: pods held what the gateway believed. Above: blocks were gone; below: it knew less.",
                ),
                Panel(
                    "Blocks in the index",
                    "short",
                    (
                        (f"{_S} known", f"max by (service) ({_G}index_blocks{{{_OWN}}})"),
                        (f"{_S} guessed", f"max by (service) ({_G}index_speculative_blocks{{{_OWN}}})"),
                    ),
                ),
                Panel(
                    "Cache events",
                    "short",
                    (
                        (f"{_S} connected", f"min by (service) ({_G}redis_connected{{{_OWN}}})"),
                        (f"{_S} lag, s", f"max by (service) ({_G}event_lag_seconds{{{_OWN}}})"),
                    ),
                    "0: a gateway cannot read Redis, and routes by what it knew.",
                ),
            ),
        ),
        (
            "Pods",
            (
                Panel("Pods that may be picked", "short", ((_S, f"min by (service) ({_G}pods{{{_OWN}}})"),)),
                Panel(
                    "Circuits not closed",
                    "short",
                    ((_P, f"max by (service, pod) ({_G}circuit_state{{{_OWN}}}) > 0"),),
                    "1: a trial request goes; 2: the pod is left alone after failures.",
                ),
                Panel(
                    "Retries and moved streams",
                    "reqps",
                    (
                        (f"{_S} retry, {{{{reason}}}}", _rate(f"{_G}retries_total", "service, reason")),
                        (f"{_S} moved, {{{{outcome}}}}", _rate(f"{_G}migrations_total", "service, outcome")),
                    ),
                ),
                Panel(
                    "Tokenizer agrees with the engine's",
                    "short",
                    ((_S, f"min by (service) ({_G}tokenizer_agrees{{{_OWN}}})"),),
                    "1 yes, 0 no: prompts then match by text. -1: the engine could not be asked.",
                ),
                Panel(
                    "Matched by text, and why",
                    "short",
                    (
                        (
                            f"{_S} {{{{reason}}}}",
                            f"max by (service, reason) ({_G}text_matching{{{_OWN}}}) > 0",
                        ),
                    ),
                    "Nothing: prompts are matched by their tokens.",
                ),
                Panel(
                    "Clients cut off, of all services",
                    "reqps",
                    (("stalled", f"sum(rate({_G}stalled_clients_total[$__rate_interval]))"),),
                    "They did not read their answers.",
                ),
                Panel(
                    "Settings file is valid",
                    "short",
                    (("valid", f"min({_G}settings_valid)"),),
                    "0: a gateway runs with older settings than its file has, which it cannot read.",
                ),
            ),
        ),
    ),
)

ENGINES = Dashboard(
    uid="leadline-engines",
    title="Leadline / Engines",
    about="Inside the pods: the batch, KV blocks, the prefix cache and speed.",
    services_of=f"{_E}ready",
    rows=(
        (
            "Batch",
            (
                Panel(
                    "Pods ready",
                    "short",
                    ((_S, f"sum by (service) ({_E}ready{{{_OWN}}})"),),
                    kind="stat",
                    width=6,
                ),
                Panel("Running", "short", ((_P, f"{_E}running_requests{{{_OWN}}}"),), width=9),
                Panel(
                    "Waiting",
                    "short",
                    ((f"{_P} {{{{priority_class}}}}", f"{_E}waiting_requests{{{_OWN}}}"),),
                    width=9,
                ),
                Panel(
                    "Requests by end",
                    "reqps",
                    (("{{service}} {{outcome}}", _rate(f"{_E}requests_total", "service, outcome")),),
                ),
                Panel("Wait for a slot", "s", _quantiles(f"{_E}queue_seconds")),
                Panel(
                    "Timeouts, preemptions, clients cut off",
                    "reqps",
                    (
                        (f"{_S} timeouts", _rate(f"{_E}timeouts_total")),
                        (f"{_S} preemptions", _rate(f"{_E}preemptions_total")),
                        (f"{_S} clients cut off", _rate(f"{_E}stalled_clients_total")),
                    ),
                    "A preempted sequence lost its blocks and is computed again. Clients are cut off that do "
                    "not read their answers.",
                ),
            ),
        ),
        (
            "Memory",
            (
                Panel(
                    "KV blocks held by sequences",
                    "percentunit",
                    ((_P, f"{_E}kv_blocks_used{{{_OWN}}} / {_E}kv_blocks{{{_OWN}}}"),),
                ),
                Panel(
                    "KV blocks kept for prefixes",
                    "percentunit",
                    ((_P, f"{_E}kv_blocks_cached{{{_OWN}}} / {_E}kv_blocks{{{_OWN}}}"),),
                ),
                Panel(
                    "Prefix cache hits",
                    "percentunit",
                    (
                        (
                            f"{_S} of tokens admitted",
                            _ratio(f"{_E}prefix_hit_tokens_total", f"{_E}prefix_query_tokens_total"),
                        ),
                        (f"{_S} of prompts", _ratio(f"{_E}cached_tokens_total", f"{_E}prompt_tokens_total")),
                    ),
                ),
            ),
        ),
        (
            "Speed",
            (
                Panel(
                    "Tokens",
                    "short",
                    (
                        (f"{_S} prompt/s", _rate(f"{_E}prompt_tokens_total")),
                        (f"{_S} generated/s", _rate(f"{_E}generation_tokens_total")),
                    ),
                ),
                Panel(
                    "Drafted tokens that were right",
                    "percentunit",
                    ((_S, _ratio(f"{_E}accepted_tokens_total", f"{_E}drafted_tokens_total")),),
                    "Empty where nothing is drafted.",
                ),
                Panel("Time to first token", "s", _quantiles(f"{_E}time_to_first_token_seconds")),
                Panel("Time between tokens", "s", _quantiles(f"{_E}inter_token_latency_seconds")),
                Panel("Time per output token", "s", _quantiles(f"{_E}time_per_output_token_seconds")),
                Panel("Whole request", "s", _quantiles(f"{_E}request_seconds")),
                Panel("Decode step", "s", ((_P, f"{_E}decode_step_seconds{{{_OWN}}}"),)),
                Panel(
                    "Prefill",
                    "short",
                    ((_P, f"{_E}prefill_tokens_per_second{{{_OWN}}}"),),
                    "Tokens a second, recently.",
                ),
                Panel(
                    "Prompt tokens still to compute", "short", ((_P, f"{_E}queued_prefill_tokens{{{_OWN}}}"),)
                ),
                Panel(
                    "Steps and heartbeat",
                    "short",
                    (
                        (f"{_P} steps/s", _rate(f"{_E}steps_total", "service, pod")),
                        (f"{_P} heartbeat age, s", f"{_E}heartbeat_age_seconds{{{_OWN}}}"),
                    ),
                ),
            ),
        ),
    ),
)

OPERATOR = Dashboard(
    uid="leadline-operator",
    title="Leadline / Operator",
    about="Services by what keeps them from being ready, and what the operator does about it.",
    rows=(
        (
            "Services",
            (
                Panel(
                    "Services",
                    "short",
                    (("services", f"sum(max by (reason) ({_O}services))"),),
                    kind="stat",
                    width=4,
                ),
                Panel(
                    "Acting replicas",
                    "short",
                    (("acting", f"sum({_O}leading)"), ("Redis users", f"max({_O}redis_users_connected)")),
                    "One, but for seconds.",
                    "stat",
                    4,
                ),
                Panel(
                    "By the reason of Ready",
                    "short",
                    (("{{reason}}", f"max by (reason) ({_O}services)"),),
                    width=16,
                ),
            ),
        ),
        (
            "Work",
            (
                Panel(
                    "Looks by outcome",
                    "ops",
                    (("{{outcome}}", _rate(f"{_O}reconciles_total", "outcome", "")),),
                ),
                Panel("Duration of a look", "s", _quantiles(f"{_O}reconcile_seconds", "", "")),
                Panel("Services waiting for a reconcile", "short", (("{{pod}}", f"{_O}queue_length"),)),
                Panel(
                    "Writes to the API server",
                    "wps",
                    (("{{method}} {{kind}}", _rate(f"{_O}api_writes_total", "method, kind", "")),),
                    "None at steady state, but for the Lease.",
                    width=24,
                ),
            ),
        ),
    ),
)

DASHBOARDS = (SERVING, ENGINES, OPERATOR)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the chart's Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="compare with the files, write nothing")
    args = parser.parse_args()
    wanted = {FOLDER / f"{one.uid.removeprefix('leadline-')}.json": render(one) for one in DASHBOARDS}
    if args.check:
        stale = [str(file) for file, text in wanted.items() if not file.exists() or file.read_text() != text]
        if stale:
            print(f"run python charts/dashboards.py: {', '.join(stale)} is out of date", file=sys.stderr)
        return int(bool(stale))
    FOLDER.mkdir(exist_ok=True)
    for file, text in wanted.items():
        file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
