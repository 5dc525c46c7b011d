"""Types and code that engine, gateway and operator share; the only package that all others may import.

chain       the prefix hash chain: which KV blocks are the same
events      cache event batches and snapshots, engine → gateway
load        heartbeat and load report, engine → gateway
keys        names of the Redis keys that carry the two
openai      the OpenAI API's requests, responses and streaming chunks
text        prompts: chat templates and tokenizers (needs tokenizers and jinja2)
http        a server's HTTP/1.1 connections, requests and answers (needs httptools)
errors      errors of both sides, and the OpenAI error object
isvc        names and reasons of the InferenceService resource

Imports no torch, no web framework and no Kubernetes client. Import the modules, not this package: nothing is
loaded that is not used.
"""
