"""A request as the gateway reads it.

body        what is read of a body, and how fields are added to one
dialects    the generation APIs, one row each
events      server-sent events, and streams of typed events that can move to another pod
migration   streams of chunks that can move
local_answers   answers that need no pod: counts, token ids, texts of ids
prompt      token ids, prefix chain, and the policy's choice among pods; several namespaces during a rollout
context     one request while it is served

Import the modules, not this package.
"""
