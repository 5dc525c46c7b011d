"""Engines, and the downloads before them, answer on every address of a pod, of whichever family."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest

from leadline.cli.fetch_progress import FetchProgress
from leadline.engine.server.process.listening import listen


def test_an_engine_listens_on_every_address(loopbacks: list[str]) -> None:
    with listen("::", 0) as listener:
        for host in loopbacks:
            socket.create_connection((host.strip("[]"), listener.getsockname()[1]), 5).close()


def test_a_download_answers_on_every_address(loopbacks: list[str]) -> None:
    with FetchProgress("org/tiny", 0) as progress:
        for host in loopbacks:
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(f"http://{host}:{progress.port}/ready", timeout=5)
