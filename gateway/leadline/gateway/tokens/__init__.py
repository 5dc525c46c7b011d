"""Prompts as the engine will see them: token ids and the prefix chain of a request, before it is routed.

service       TokenService: the prompts of one model's requests
segments      where a text may be cut so that the parts tokenize as the whole does
encoder       what the parts tokenize to: remembered, waited for, or found out in a thread
memo          caches, bounded by bytes: parts of texts, prefix chains, whole prompts of short chats
mode          TokenMode: exact, or by text and for which reason; its metric
approximate   ApproximateTokens: the same interface over pieces of text, when there is no tokenizer
parity        whether an engine arrives at the same token ids

Import the modules, not this package.
"""
