"""Anthropic's Messages API as msgspec Structs: requests, answers and events, errors.

content       blocks and messages of a request
conversation  messages of a request as messages of a chat
request       MessagesRequest and CountTokensRequest, with the chat that each stands for
answers       answers and the events of a stream
errors        the shape of errors
"""
