"""The Responses API (`POST /v1/responses`) as msgspec Structs. Answers of completions are another thing: they
are in `leadline.protocol.openai.answers`.

items    what `input` holds, and the messages of a chat that it stands for
request  the request, as a chat
objects  the response object, its output items and the events of a stream
"""

from leadline.protocol.responses.request import ResponsesRequest, in_words_of_responses

__all__ = ["ResponsesRequest", "in_words_of_responses"]
