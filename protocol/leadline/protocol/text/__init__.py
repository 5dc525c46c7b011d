"""From a request's text to the token ids of its prompt, the same in the engine and in the gateway.

prompts                the prompt of a request body, and its token ids
tokenizer, pieces      text ↔ token ids; what bytes a token stands for
bundle                 all of a tokenizer in one message, for who has no model files
chat, messages_in      chat templates, and messages as they see them
template_sandbox       the environment of templates, with bounds
template_shape         which forms of messages a template takes

Needs the packages tokenizers and jinja2, which the rest of `protocol` does not: only the engine and the
gateway import this package.
"""
