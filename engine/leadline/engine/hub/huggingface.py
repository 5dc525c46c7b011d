"""Models of the Hugging Face hub: hf://org/name[@revision].

huggingface_hub does the work and honours HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE; this file
chooses the files and turns its errors into sentences.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from leadline.engine.errors import ConfigError, EngineError, ModelNotFound, ModelUnreachable, Unauthorized
from leadline.engine.hub.local import LocalModel
from leadline.engine.system.progress import ByteMeter, ReportStage, no_report

__all__ = ["resolve_hub_model"]

_TEMPLATES, _POOLING = "additional_chat_templates", "1_Pooling"
"""Of templates beside the default one, and of sentence-transformers' pooling: the only folders of a
repository that are fetched."""
_CONFIG_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    f"{_TEMPLATES}/*.jinja",
    "modules.json",
    f"{_POOLING}/config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
]
_WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json"]


def _other_folders_than(*names: str) -> list[str]:
    """Patterns of all files in folders, but those right in one of the folders `names`. A pattern's * matches
    / too and there is no pattern for "not this word", so one stands for each beginning that a name has, and
    for each letter in which another name differs. None of `names` begins with another."""
    beginnings = {name[:length] for name in names for length in range(len(name))}
    patterns = []
    for beginning in sorted(beginnings):
        following = "".join(sorted({name[len(beginning)] for name in names if name.startswith(beginning)}))
        patterns += [f"{beginning}/*", f"{beginning}[!{following}/]*/*"]
    return [*patterns, *(f"{name}[!/]*/*" for name in names), *(f"{name}/*/*" for name in names)]


# Copies in other formats: folders such as original/ or onnx/, and Mistral's consolidated files beside the
# sharded ones.
_IGNORED = [*_other_folders_than(_TEMPLATES, _POOLING), "consolidated*"]
_PASSING = (408, 429)
"""HTTP statuses below 500 that say nothing of the model: the same request may be answered later."""


def resolve_hub_model(
    name: str,
    *,
    download_dir: str | os.PathLike[str] | None,
    progress: bool,
    weights: bool,
    report: ReportStage = no_report,
    config_only: bool = False,
    check: Callable[[Path], None] | None = None,
) -> LocalModel:
    """Fetch what is not in the hub's cache yet, config.json first for `check`. Raises ModelNotFound,
    ModelUnreachable, Unauthorized or ConfigError."""
    repository, _, revision = name.removeprefix("hf://").partition("@")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise ModelNotFound(f"{name!r} is no hub address; write hf://org/name or hf://org/name@revision")

    from huggingface_hub import snapshot_download

    patterns = _CONFIG_FILES + (_WEIGHT_FILES if weights else [])
    if config_only:
        patterns, weights = _CONFIG_FILES[:2], False
    wanted: dict[str, Any] = {
        "revision": revision or None,
        "cache_dir": download_dir,
        "allow_patterns": patterns,
        "ignore_patterns": _IGNORED,
    }
    if check is not None:
        small = wanted | {"allow_patterns": _CONFIG_FILES[:2]}
        with _sentences(name, repository, revision or None), _progress_bars(False):
            folder = snapshot_download(repository, **small)
        if (Path(folder) / "config.json").is_file():
            check(Path(folder))
    with _sentences(name, repository, revision or None), _progress_bars(progress):
        if report is not no_report and (missing := _bytes_to_fetch(repository, wanted)):
            wanted["tqdm_class"] = _metered_bar(ByteMeter("downloading", missing, report))
        folder = snapshot_download(repository, **wanted)
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{name} is on the hub, but has no config.json: it is no transformers model")
    if weights and not any(path.glob("*.safetensors")):
        raise ModelNotFound(f"{name} has no *.safetensors; other weight formats are not read")
    # The cache lays snapshots out as snapshots/<commit hash>.
    return LocalModel(path, repository, path.name)


def _bytes_to_fetch(repository: str, wanted: dict[str, Any]) -> int:
    """Bytes that are not in the cache yet; 0 too where the hub cannot be asked, whose error the download
    itself will raise, unless the cache will do."""
    from huggingface_hub import constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        return 0
    try:
        files: Any = snapshot_download(repository, dry_run=True, **wanted)
    except Exception:
        return 0
    return sum(file.file_size or 0 for file in files if file.will_download)


def _metered_bar(meter: ByteMeter) -> type[Any]:
    """Return a class of bars, shown or not, that passes the updates of the bar over bytes written to `meter`.
    There is one such bar over all files; a bar over bytes received, where the hub's protocol makes the two
    differ, and one that counts files stand beside it."""
    from huggingface_hub.utils import tqdm

    class MeteredBar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = kwargs.get("unit") == "B" and not str(kwargs.get("name")).endswith(".transfer")
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts and n and n > 0:
                meter.add(int(n))
            return super().update(n)

    return MeteredBar


@contextlib.contextmanager
def _sentences(name: str, repository: str, revision: str | None) -> Iterator[None]:
    """Turn huggingface_hub's errors into ours."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise Unauthorized(
            f"{name} is gated: ask for access on its model page, then set HF_TOKEN to a token of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"{repository} exists on the hub, but has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise _missing_or_private(name) from error
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise ModelNotFound(
                f"{name} is not (or not wholly) in the local cache, and HF_HUB_OFFLINE is set: "
                "unset it to download"
            ) from error
        cause = error.__cause__ or error
        if isinstance(cause, errors.HfHubHTTPError):
            raise _http_error(name, cause) from error
        raise ModelUnreachable(
            f"{name} is not (or not wholly) in the local cache and the hub cannot be reached: {cause}"
        ) from error
    except errors.HfHubHTTPError as error:
        raise _http_error(name, error) from error
    except errors.HFValidationError as error:
        raise ModelNotFound(f"{name!r} is no hub address: {error}") from error
    except OSError as error:
        if error.errno is None or isinstance(error, (ConnectionError, TimeoutError)):
            # No answer of a file system: a connection that broke, or the hub's client, of a file cut short.
            raise ModelUnreachable(f"the download of {name} broke off: {error}") from error
        raise ConfigError(
            f"{name} cannot be stored in the hub's cache ({error}); set HF_HOME (or download_dir) to a "
            "directory that can be written and has room"
        ) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2"):  # the hub's HTTP client
            raise
        if type(error).__name__ in ("UnsupportedProtocol", "InvalidURL"):
            raise ConfigError(f"HF_ENDPOINT {constants.ENDPOINT!r} is no address: {error}") from error
        raise ModelUnreachable(f"{name} cannot be fetched, the hub cannot be reached: {error}") from error


def _http_error(name: str, error: object) -> EngineError:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status in (401, 403):
        return Unauthorized(f"the hub refused the token for {name} (HTTP {status}); check HF_TOKEN")
    kind = ModelUnreachable if status >= 500 or status in _PASSING else ModelNotFound
    return kind(f"the hub answered HTTP {status} for {name}: {error}")


def _missing_or_private(name: str) -> ModelNotFound | Unauthorized:
    from huggingface_hub import get_token

    if get_token():
        return ModelNotFound(
            f"{name} does not exist on the hub, or is private to another account than HF_TOKEN's"
        )
    return ModelNotFound(f"{name} does not exist on the hub; if it is private, set HF_TOKEN")


@contextlib.contextmanager
def _progress_bars(enabled: bool) -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if enabled or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
