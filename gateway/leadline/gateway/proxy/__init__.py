"""HTTP in, the right pod out: the gateway's hot path, from a client's bytes to a pod's and back.

Requests come as an Exchange of `leadline.protocol.http`. In reading order:

    handler          key, body, service, prompt, limits, door; errors
    body             what is read of a request, and how fields are added to it
    routing          prompt chain, matches, the policy's choice; namespaces: several chains during a rollout
    attempts         pods tried one after the other until the first byte; attempt: one of them
    outgoing         what a pod is sent
    relay            the answer's way back: whole, streamed, moved
    migration        one stream over several pods
    upstream         HTTP/1.1 to pods; pool: connections kept; patience: waiting, and pods that hang
    capability       whether the streams of a pod can move
    breaker, headers, events, gate, settings, call, access_log, tracing: their parts

Import the modules, not this package.
"""
