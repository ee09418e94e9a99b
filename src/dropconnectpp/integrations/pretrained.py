"""A converted Hugging Face model as a folder, there and back: its config, and weights and gates in one file."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dropconnectpp.errors import ArgumentError, FileFormatError, MissingPackageError
from dropconnectpp.integrations.model_outputs import likelihood_of
from dropconnectpp.io import load, save
from dropconnectpp.io.naming import unwrapped
from dropconnectpp.likelihoods import remember, remembered

try:
    import huggingface_hub
    import transformers
except ImportError as error:
    raise MissingPackageError(
        "dropconnectpp.integrations.transformers needs transformers: pip install 'dropconnectpp[transformers]'."
    ) from error

FILE = "dropconnectpp.safetensors"
"""Its name is not the one that transformers reads: a plain model would silently do without the gates."""


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write a model of `transformers` with its gates, for `from_pretrained` of this module.

    Args:
        model: A converted model, whatever wraps it.
        folder: Where ``config.json`` and ``dropconnectpp.safetensors`` go; made if it is not there.

    Raises:
        ArgumentError: The model is none of `transformers`.
    """
    inner: Any = unwrapped(model)
    if not isinstance(inner, transformers.PreTrainedModel):
        raise ArgumentError(
            f"save_pretrained needs a model of transformers, got a {type(inner).__name__}. Use dropconnectpp.save."
        )
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(inner.config)
    config.architectures = [type(inner).__name__]
    config.dtype = inner.dtype
    config.save_pretrained(place)
    if inner.can_generate():
        inner.generation_config.save_pretrained(place)
    save(inner, place / FILE)


def from_pretrained(
    source: str | os.PathLike[str], *, model_class: type[nn.Module] | None = None, **options: Any
) -> nn.Module:
    """Read what `save_pretrained` of this module wrote.

    Args:
        source: The folder, or the name of a repository on the Hub.
        model_class: The model's class, where it is not one of `transformers`' own.
        **options: Go to `huggingface_hub.snapshot_download`, such as ``revision``.

    Returns:
        The model with its gates, in eval mode.

    Raises:
        FileFormatError: The folder holds no such model, or a damaged one.
    """
    place = Path(source)
    if not place.is_dir():
        place = Path(huggingface_hub.snapshot_download(str(source), **options))
    if not (place / FILE).is_file():
        raise FileFormatError(
            f"{place}: has no {FILE}, so it was not written by dropconnectpp's save_pretrained. A plain model comes "
            "from transformers' from_pretrained; convert it then."
        )
    config = transformers.AutoConfig.from_pretrained(place)
    made: Any = (model_class or _class_of(place, config))(config)
    made.to(config.dtype or torch.float32)
    if made.can_generate():
        with contextlib.suppress(OSError):  # without one it has the config's
            made.generation_config = transformers.GenerationConfig.from_pretrained(place)
    filled = load(place / FILE, made)
    if remembered(filled) is None:
        with contextlib.suppress(ArgumentError):  # predict will ask for one
            remember(filled, likelihood_of(filled))
    return filled.eval()


def _class_of(place: Path, config: Any) -> Any:
    for name in config.architectures or []:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    raise FileFormatError(
        f"{place}: its config names no model of transformers, but {config.architectures!r}. Give model_class."
    )


def push_to_hub(model: nn.Module, repository: str, **options: Any) -> Any:
    """Upload what `save_pretrained` writes to a repository of models on the Hub.

    Args:
        model: A converted model.
        repository: Its name, such as "user/model"; made if it is not there.
        **options: Go to `huggingface_hub.HfApi.upload_folder`, such as ``commit_message``; ``private`` and ``token``
            also to `create_repo`.

    Returns:
        What the Hub says of the commit.
    """
    private = options.pop("private", None)
    client = huggingface_hub.HfApi(token=options.pop("token", None))
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder)
        client.create_repo(repository, private=private, exist_ok=True)
        return client.upload_folder(repo_id=repository, folder_path=folder, **options)
