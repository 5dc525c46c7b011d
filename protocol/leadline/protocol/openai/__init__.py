"""The OpenAI API as msgspec Structs: requests, answers and streaming chunks of the server and the gateway.

body        decode_body: bytes to a request, with errors that name the field
common      what both kinds of completion share
chat        chat completion requests and messages
completion  text completion requests
answers     answers and chunks of both
service     models, tokenize, detokenize, version, administration

The server's OpenAPI document is made from these types, so the ranges written here are the ranges that hold.
"""

from leadline.protocol.openai.answers import ChatCompletion, ChatCompletionChunk, Completion
from leadline.protocol.openai.body import InvalidBody, decode_body, encode_body
from leadline.protocol.openai.chat import ChatCompletionRequest
from leadline.protocol.openai.completion import CompletionRequest

__all__ = [
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatCompletionRequest",
    "Completion",
    "CompletionRequest",
    "InvalidBody",
    "decode_body",
    "encode_body",
]
