"""The OpenAI API over HTTP: `serve` runs a server process, `create_app` builds the FastAPI application alone.

In reading order:

    settings, state, run     the process: socket, start-up, drain, exit code
    listening                the port, and uvicorn on it; edge: the application behind leadline.protocol.http
    pool, worker, control    further API processes on the same port and engine
    app, openapi             routes, and the document that describes them
    http                     bodies, errors, event streams
    params                   request types → SamplingParams
    chat, completions        the two generation endpoints; logprobs, usage: their parts
    service                  models, tokenize, health, metrics, administration
    outlet                   tokens in the middle of a stream, straight to the socket
    metrics, token_meter, exposition, logs

Talks to `AsyncEngine` and the frontend's text tools only; importing this package imports no torch.
"""

from leadline.engine.server.app import create_app
from leadline.engine.server.run import serve
from leadline.engine.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app", "serve"]
