"""The server as a process.

run         start, drain, exit code
listening   the port, and uvicorn on it; edge: the application as `leadline.protocol.http` serves it
pool        further API processes on the same port and engine; worker: one of them; control: their messages
publishing  joins the server to the publisher
logs        log lines as text or JSON

Import the modules, not this package.
"""
