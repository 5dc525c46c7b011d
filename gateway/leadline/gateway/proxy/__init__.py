"""HTTP in, the right pod out: the gateway's hot path, from a client's bytes to a pod's and back.

In reading order:

    server_protocol  HTTP/1.1 from clients, under uvicorn; timeouts, pipelining, a client that leaves
    request_reader   requests out of a client's bytes; client_socket: those bytes, both ways
    exchange         one request and its answer
    handler          key, body, service, prompt, limits, door; errors
    body             what is read of a request, and how fields are added to it
    routing          prompt chain, matches, the policy's choice; namespaces: several chains during a rollout
    attempts         pods tried one after the other until the first byte; attempt: one of them
    outgoing         what a pod is sent
    relay            the answer's way back: whole, streamed, moved
    migration        one stream over several pods
    upstream         HTTP/1.1 to pods; pool: connections kept; patience: waiting, and pods that hang
    capability       whether the streams of a pod can move
    asgi             the gateway's other routes
    breaker, deadlines, headers, events, gate, settings, call, access_log, tracing: their parts

Import the modules, not this package.
"""
