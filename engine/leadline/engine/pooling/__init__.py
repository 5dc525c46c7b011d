"""Models that read texts and write vectors or scores: encoders, and decoders with `--task embed` or `rerank`.

They share the server, the core process and its messages with models that generate, and nothing of scheduler,
KV cache and sampling (decision 034). In reading order:

    spec              what a checkpoint is served for, from its files
    builder           requests, checked and tokenized (API process)
    calls             requests in flight (API process)
    queue             whose inputs come next
    core              the engine core: queue and runner behind the core process's loop
    runner            a step: packed inputs through the model, pooled
    packed_attention  attention without a KV cache
"""
