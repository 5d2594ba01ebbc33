"""Find a model, a folder or one of the hub, and see that its files are whole, before any weight is read."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from groupwise.errors import ModelError
from groupwise.hub import asked_once

UNREADABLE = (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, RuntimeError, StrictDataclassError)
"""What transformers and its hub raise about files that are missing, damaged or contradict each other."""
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")


def load_config(path: str | Path, *, causal: bool = True) -> Any:
    """The config.json of the model at `path`; `causal` refuses one that is no causal language model.

    Raises:
        ModelError: there is no such model, its config is missing or damaged, or it is not causal and should be.
    """
    _require_folder(path)
    if _is_path(path):
        _require_config(path, Path(path).expanduser())
    try:
        with asked_once():
            config = AutoConfig.from_pretrained(where(path))
    except UNREADABLE as error:
        looked = "" if _is_path(path) else f"looked for a folder {Path(path).absolute()}, no such folder; as a hub id "
        raise ModelError(
            f"{path}: {looked}it cannot be read: {first_line(error)}; give a folder that save_pretrained wrote, or the "
            "id of a model on huggingface.co that this machine can reach"
        ) from error
    if causal:
        _require_causal(path, config)
    return config


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model at `path`.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    _require_folder(path)
    if _is_path(path):
        _require_json(path, Path(path).expanduser())
    beside = "save one beside the model with tokenizer.save_pretrained"
    try:
        with asked_once():
            tokenizer = AutoTokenizer.from_pretrained(where(path))
    except UNREADABLE as error:
        raise ModelError(f"{path}: the tokenizer cannot be loaded: {first_line(error)}; {beside}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes one up out of nothing
        raise ModelError(f"{path}: the tokenizer cannot be loaded: it has no tokens (no tokenizer.json?); {beside}")
    return tokenizer


def load_generation_config(path: str | Path) -> GenerationConfig | None:
    """The generation_config.json of the model at `path`, if it has one."""
    with contextlib.suppress(OSError), asked_once():
        return GenerationConfig.from_pretrained(where(path))
    return None


def where(path: str | Path) -> str:
    """The folder or the hub id, as transformers takes it."""
    return str(Path(path).expanduser()) if _is_path(path) else str(path)


def first_line(error: Exception) -> str:
    """What an error of a library says first; the rest is usually about the library."""
    first, *rest = (str(error).strip() or repr(error)).splitlines()
    return f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first.rstrip(".")


def _is_path(path: str | Path) -> bool:
    """Whether it is a folder, or is spelled like one and can be no hub id (`name` or `owner/name`)."""
    text = str(path)
    return isinstance(path, Path) or Path(text).is_dir() or text.startswith((".", "~", "/")) or text.count("/") > 1


def _require_folder(path: str | Path) -> None:
    if not str(path):
        raise ModelError(f"model: {str(path)!r}; {_ACCEPTED}")
    if _is_path(path) and not Path(path).expanduser().is_dir():
        raise ModelError(
            f"{path}: looked for a folder {Path(path).expanduser().absolute()}, but there is no such folder; "
            f"{_ACCEPTED}"
        )


_ACCEPTED = "give a folder that save_pretrained wrote, or a hub id such as Qwen/Qwen3-0.6B"


def _require_config(path: str | Path, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        kind = "it holds an adapter: merge it into its model, and " if adapter else ""
        raise ModelError(f"{path}: the folder has no config.json; {kind}write one with model.save_pretrained")
    _require_json(path, folder)


def check_weights(path: str | Path) -> None:
    """Make sure that the weights of a model in a folder are all there; those of a hub are there when they are loaded.

    Raises:
        ModelError: a file of them is missing or cut short.
    """
    folder = Path(path).expanduser()
    if not _is_path(path):
        return
    if not any(file for pattern in WEIGHT_FILES for file in folder.glob(pattern)):
        raise ModelError(
            f"{path}: the folder has a config.json but no weights (model.safetensors or pytorch_model.bin); "
            "write them with model.save_pretrained"
        )
    for file in _weight_files(path, folder):
        _require_whole(path, file)


def _require_json(path: str | Path, folder: Path) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        file = folder / name
        try:
            json.loads(file.read_text(encoding="utf-8") if file.is_file() else "{}")
        except ValueError as error:
            raise ModelError(f"{path}: {name} is damaged: {first_line(error)}; {_AGAIN}") from error


def _weight_files(path: str | Path, folder: Path) -> list[Path]:
    """The files that transformers will read, in its order of preference.

    Raises:
        ModelError: the index is damaged, or names a file that is not there.
    """
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = next((file for file in sorted(folder.glob("*.index.json"), reverse=True)), None)
    if index is None:
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path}: {index.name} is damaged ({type(error).__name__}: {first_line(error)}); {_AGAIN}"
        ) from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ModelError(
            f"{path}: {index.name} names {len(names)} files of weights, of which {missing[0]}{others} "
            f"{'are' if others else 'is'} not there; {_AGAIN}"
        )
    return [folder / name for name in names]


_AGAIN = "copy or download the model again, or write it with model.save_pretrained"


def _require_whole(path: str | Path, file: Path) -> None:
    if file.suffix != ".safetensors":
        return
    try:
        with safe_open(file, framework="pt"):  # reads the header, which says how long the file has to be
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path}: {file.name} ({file.stat().st_size} bytes) is damaged or cut short: {first_line(error)}; {_AGAIN}"
        ) from error


def _require_causal(path: str | Path, config: Any) -> None:
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    stored = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)]
    if getattr(config, "is_encoder_decoder", False) or not known.intersection(stored):
        kind = "an encoder-decoder" if getattr(config, "is_encoder_decoder", False) else "no causal language model"
        raise ModelError(
            f"{path}: {', '.join(stored)} is {kind}; only models that predict the next token can be trained here, "
            "those that AutoModelForCausalLM loads"
        )
