"""Everything between a caller's text and the core's token ids. Imports no torch.

Tokenizer and chat templates are `leadline.protocol.text`'s, because the gateway uses them too.

In reading order:

    validation             the one place where requests are checked and become CoreRequests
    structured             JSON, schema, regex and grammar constraints as token masks
    detokenizer, stop      token ids → final text, increment by increment
    output_processor       CoreOutput → OutputDelta, for all requests in flight
    collector              OutputDelta → RequestOutput
    tool_formats           tool calls out of text
    tool_schema            constraints for tool_choice
"""
