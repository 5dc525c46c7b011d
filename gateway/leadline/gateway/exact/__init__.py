"""How a service comes to be matched by exact tokens, and why it is not where it is not.

    folder, if configured ─┐
    GET /admin/tokenizer ──┼─▶ TokenPool ──▶ compared with a pod's /tokenize ──▶ Service.tokens
    of a ready pod         ┘

mode     TokenMode: exact, or by text and for which reason; the metric and what /v1/models says
fetch    the bundle of one pod: size, digest, time limits
pool     one TokenService for all services of one tokenizer
keeper   one a service: which tokenizer is wanted, when to ask again, the exchange

Off every request's path. A service is matched by text (tokens/approximate.py) until the tokenizer is there,
and whenever it turns out to be another than the pods'.
"""
