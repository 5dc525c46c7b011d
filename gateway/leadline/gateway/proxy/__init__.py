"""HTTP in, the right pod out: the gateway's hot path, from a client's bytes to a pod's and back.

In reading order:

    handler      raw ASGI: key, body, service, prompt, limits, door; errors; a client that leaves
    body         what is read of a request, and how fields are added to it
    routing      prompt chain, matches, the policy's choice
    attempts     pods tried one after the other until the first byte
    relay        the answer's way back: whole, streamed, moved
    migration    one stream over several pods
    upstream     HTTP/1.1 to pods
    breaker, headers, events, gate, settings, call, access_log, tracing: their parts

Import the modules, not this package.
"""
