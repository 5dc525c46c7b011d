"""The API process's side of the engine.

async_engine   AsyncEngine: tokenizer, requests in flight, calls to the core
core_client    the connection to the core process, and that process's start and end
streams        the deltas of each request, from the core to its reader

Import the modules, not this package. No torch.
"""
