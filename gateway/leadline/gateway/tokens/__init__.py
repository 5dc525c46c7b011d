"""Prompts as the engine will see them: token ids and the prefix chain of a request, before it is routed.

service       TokenService: the prompts of one model's requests, tokenized once
segments      where a text may be cut so that the parts tokenize as the whole does
memo          what parts of texts tokenize to
chain_memo    hashes of blocks that an earlier prompt began with as well
lru           the bounded cache under both
approximate   ApproximateTokens: the same interface over pieces of text, when there is no tokenizer
parity        whether an engine arrives at the same token ids

Import the modules, not this package.
"""
