"""Everything between a caller's text and the core's token ids. Imports no torch.

In reading order:

    tokenizer, pieces      text ↔ token ids; what bytes a token stands for
    chat, messages_in      chat templates, and messages as they see them
    validation             the one place where requests are checked and become CoreRequests
    structured             JSON, schema, regex and grammar constraints as token masks
    detokenizer, stop      token ids → final text, increment by increment
    output_processor       CoreOutput → OutputDelta, for all requests in flight
    collector              OutputDelta → RequestOutput
    tools, tool_hermes, tool_llama, json_scan    tool calls out of text
    tool_schema            constraints for tool_choice
"""
