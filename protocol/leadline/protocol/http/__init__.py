"""HTTP/1.1 for servers: the engine and the gateway take requests and give answers by the same code.

In reading order:

    server_protocol  a client's connection, under uvicorn; timeouts, pipelining, a client that leaves
    request_reader   requests out of a client's bytes; client_socket: those bytes, both ways
    exchange         one request and its answer
    head             what a request's headers must hold to: one Authorization, no compressed body, its length
    asgi             an ASGI application (FastAPI) behind an exchange: all routes off the hot path
    settings, answers, request_id, deadlines: their parts

Import the modules, not this package. Needs httptools, which comes with `uvicorn[standard]`.
"""
