"""The generation APIs.

params                     request types → SamplingParams; prompts
generation                 what all of them share: streams, errors, metrics
chat, completions          OpenAI's endpoints; logprobs: their part
turn                       one assistant turn: text, thoughts, tool calls
messages, responses        Anthropic's Messages and OpenAI's Responses
message_blocks, response_items, typed_events   their streams

Import the modules, not this package.
"""
