"""The gateway's metrics.

metrics        GatewayMetrics: counters and histograms, by service
tallies        counters and histograms that are cheap enough for every event of a stream
state_gauges   gauges of the state of services and pods
port           `GET /metrics` on a port of its own

Import the modules, not this package.
"""
