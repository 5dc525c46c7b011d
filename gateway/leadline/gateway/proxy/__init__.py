"""The path of a request from the client to a pod and back.

Requests arrive as an Exchange of `leadline.protocol.http`. In reading order:

handler      key, body, service, prompt, limits, admission; errors
dispatcher   pods tried one after the other until the first byte
forwarding   what a pod is sent, and which headers pass in both directions
relay        the answer: whole, streamed, moved to another pod
access_log, tracing

Import the modules, not this package.
"""
