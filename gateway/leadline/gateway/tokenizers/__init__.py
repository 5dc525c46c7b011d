"""Loads the tokenizer of each service, and reports why when it cannot.

    folder, if configured ─┐
    GET /admin/tokenizer ──┼─▶ TokenPool ──▶ compared with a pod's /tokenize ──▶ Service.tokens
    of a ready pod         ┘

loader    one per service: which tokenizer is wanted, when to ask again, the exchange
bundles   fetches the tokenizer of a pod (size, digest, time limits), and keeps one TokenService per tokenizer

Not on the path of requests. A service is matched by text (tokens/approximate.py) until its tokenizer is
loaded, and whenever it differs from the tokenizer of the pods.
"""
