"""The engine core as a process of its own.

main            the process: loads the engine, receives requests, sends outputs
engine_core     EngineCore: the loop of scheduler and runner
output_sender   sends the outputs to the API process that owns each request
step_bounds     how long a step may take before it counts as hung

Import the modules, not this package.
"""
