"""The OpenAI API over HTTP: `serve` runs a server process, `create_app` builds the FastAPI application alone.

In reading order:

    settings, state   the server's settings, and the phase that it is in
    process/          the process: socket, start-up, drain, exit code, further API processes
    app               routes, keys, errors
    http/             bodies, errors, event streams
    api/              the generation APIs
    routes/           models, tokenize, health, metrics, administration
    metrics/          counters and their text

Talks to `AsyncEngine` and the frontend's text tools only; importing this package imports no torch.
"""

from leadline.engine.server.app import create_app
from leadline.engine.server.process.run import serve
from leadline.engine.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app", "serve"]
