"""The one place where a model's name is understood."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from leadline.engine.errors import ModelNotFound
from leadline.engine.hub.local import LocalModel, check_model_folder, folder_revision
from leadline.engine.system.progress import ReportStage, no_report

__all__ = ["resolve_model"]

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_FORMS = "smollm2, hf://org/name[@revision], file:///path, or a path to a folder or a GGUF file"


def resolve_model(
    name: str,
    *,
    download_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    report: ReportStage = no_report,
    weights: bool = True,
    config_only: bool = False,
    check: Callable[[Path], None] | None = None,
) -> LocalModel:
    """The local folder of a model, downloaded or converted first if need be.

    `download_dir` replaces the cache directory (`$LEADLINE_CACHE`, else `~/.cache/leadline`, for smollm2;
    and for GGUF files; the hub's own cache, governed by HF_HOME, for hf://). `progress`: bars on stderr;
    `report` hears how far a download or conversion is. `weights=False` fetches an hf:// model's config and
    tokenizer only, `config_only` its config.json and generation_config.json only. `check` gets the folder of
    an hf:// model as soon as its config.json is there, and raises to have nothing else fetched.

    Raises ModelNotFound, ModelUnreachable (the hub does not answer), Unauthorized (it wants a token, or
    another one), or ConfigError (an unusable cache directory).
    """
    name = name.strip()
    if not name:
        raise ModelNotFound(f"the model's name is empty; it may be {_FORMS}")
    if name == "smollm2":
        from leadline.engine.hub.demo import resolve_demo_model

        return resolve_demo_model(download_dir=download_dir, progress=progress, report=report)
    if name.startswith("hf://"):
        from leadline.engine.hub.huggingface import resolve_hub_model

        return resolve_hub_model(
            name,
            download_dir=download_dir,
            progress=progress,
            report=report,
            weights=weights,
            config_only=config_only,
            check=check,
        )
    if "://" in name and not name.startswith("file://"):
        scheme = name.split("://", 1)[0]
        raise ModelNotFound(f"{name!r}: {scheme}:// is not a scheme models come from; use {_FORMS}")
    path = _path(name)
    if path.suffix == ".gguf" and path.is_file():
        from leadline.engine.hub.gguf import resolve_gguf

        return resolve_gguf(path, download_dir=download_dir, report=report, config_only=config_only)
    check_model_folder(path, asked=name)
    path = path.resolve()
    return LocalModel(path, path.name, folder_revision(path))


def _path(name: str) -> Path:
    if name.startswith("file://"):
        parts = urlsplit(name)
        if parts.netloc not in ("", "localhost"):
            raise ModelNotFound(f"{name!r} names a host, {parts.netloc!r}; a local folder is file:///path")
        path = Path(unquote(parts.path))
    else:
        path = Path(name).expanduser()
        if not path.exists() and not name.startswith((".", "/", "~")):
            raise ModelNotFound(_unknown_name(name))
    return path


def _unknown_name(name: str) -> str:
    if _REPOSITORY.fullmatch(name):
        return f"no folder {name!r} here; for the Hugging Face model of that name write hf://{name}"
    if name.lower().replace("-", "").startswith("smollm2"):
        return f"no model {name!r}; the demo model's name is smollm2"
    return f"no model {name!r}; a model may be {_FORMS}"
