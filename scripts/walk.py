"""Print the files of this repository that one streamed chat passes, in the order in which it enters them.

    python scripts/walk.py [MODEL]

Starts `leadline up` with one engine. A profile function in each process notes the files whose functions are
called between the request and the last event of its answer; the request is the second of its kind, so nothing
is loaded or compiled meanwhile. Files of work that no request waits for are left out (`_BACKGROUND`). The
counts are those of docs/architecture.md."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BACKGROUND = (
    *("gateway/sync/", "gateway/discovery/", "gateway/background", "gateway/tokenizers/", "gateway/config/"),
    *("index/stream", "state_gauges", "engine/publisher/", "process/publishing", "system/pulse"),
    *("protocol/keys", "protocol/wire", "cli/launcher", "cli/valkey"),
)
_TEXT = (
    "You answer questions about trains, tickets and stations of a railway company, in short sentences. " * 8
)

_PROFILE = """
import json, os, sys, threading, time
from pathlib import Path
folder = os.environ.get("LEADLINE_WALK")
if folder:
    state = {"on": False}
    seen = {}
    def profile(frame, event, argument):
        if state["on"] and event == "call":
            name = frame.f_code.co_filename
            if "/leadline/" in name and "site-packages" not in name:
                seen.setdefault(name.rpartition("/leadline/")[2])
    def watch():
        while True:
            on = Path(folder, "on").exists()
            if state["on"] and not on:
                state["on"] = False
                Path(folder, f"{os.getpid()}.json").write_text(json.dumps([sys.argv, list(seen)]))
                seen.clear()
            state["on"] = on
            time.sleep(0.02)
    threading.Thread(target=watch, daemon=True).start()
    threading.setprofile(profile)
    sys.setprofile(profile)
"""


def ask(url: str, question: str) -> None:
    messages = [{"role": "system", "content": _TEXT}, {"role": "user", "content": question}]
    body = {"model": "m", "messages": messages, "stream": True, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def main(model: str = "smollm2") -> int:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(_PROFILE)
        path = os.pathsep.join((folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        command = [sys.executable, "-m", "leadline.cli.main", "up", model, "--replicas=1", "--port=0"]
        process = subprocess.Popen(
            [*command, "--served-name=m", "--max-model-len=2048"],
            env={**os.environ, "PYTHONPATH": path, "LEADLINE_WALK": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout is not None
            url = next(found[0] for line in process.stdout if (found := re.search(r"http://[\w.:]+", line)))
            for question in ("Where is the station?", "When does it open?"):
                ask(url, question)
            time.sleep(1)  # until the cache events of these are read
            Path(folder, "on").touch()
            time.sleep(0.1)
            ask(url, "What does a ticket cost?")
            Path(folder, "on").unlink()
            time.sleep(0.3)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
        for found in sorted(Path(folder).glob("*.json")):
            arguments, files = json.loads(found.read_text())
            files = [name for name in files if not any(part in name for part in _BACKGROUND)]
            if files:
                print(f"\n{' '.join(arguments[:3])}: {len(files)} files")
                print("\n".join(f"    {name}" for name in files))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
