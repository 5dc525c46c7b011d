"""The engine's metrics.

metrics      counters, histograms and gauges
exposition   their text, for several API processes together; the meter of tokens per second

Import the modules, not this package.
"""
