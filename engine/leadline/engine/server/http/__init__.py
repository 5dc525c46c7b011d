"""What the server knows about HTTP, and about no model.

responses      bodies, errors, event streams
socket_writer   events of running streams, straight to the client's socket

Import the modules, not this package.
"""
