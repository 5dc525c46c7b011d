"""HTTP/1.1 for servers: the engine and the gateway take requests and give answers by the same code.

In reading order:

    server_protocol  a client's connection, under uvicorn; timeouts, pipelining, a client that leaves
    exchange         one request and its answer
    headers          one Authorization, no compressed body, the announced length; X-Request-ID
    asgi             an ASGI application (FastAPI) behind an exchange: all routes off the hot path
    settings, answers, deadlines: their parts

Import the modules, not this package. Needs httptools, which comes with `uvicorn[standard]`.
"""
