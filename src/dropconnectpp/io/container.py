"""A safetensors file with a digest of its content.

Files are written here, not by the safetensors package, so that equal models give equal bytes and every write can fail
cleanly; they are read by the package.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.errors import ArgumentError, FileFormatError
from dropconnectpp.io.disk import require
from dropconnectpp.io.naming import shown

DIGEST = "digest"
LARGEST_HEADER = 1 << 25
"""No header is longer: one of some ten thousand layers is a tenth of that."""
_RAISED = (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError)
"""What versions of the safetensors package raise beside their own error, and before they allocate."""
_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Tensors on the CPU and their metadata, and the digest of both, as a safetensors file."""
    # The widest first, as the format asks: each then starts at a multiple of its width.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {**metadata, DIGEST: content_digest(tensors, metadata)}}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER:
        raise ArgumentError(f"save: the model's names and options take {len(text)} bytes, more than {LARGEST_HEADER}.")
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            file.write(_memory(tensors[name]))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file; `FileFormatError` where there is none, or it is damaged."""
    safetensors = require("safetensors", "io")
    try:
        if path.is_dir():
            raise FileFormatError(f"{path}: is a folder. Give the path of the file that save wrote.")
        if not path.is_file():
            why = "is no plain file" if path.exists() else "there is no such file"
            raise FileFormatError(f"{path}: {why}. Give the path of the file that save wrote.")
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > LARGEST_HEADER:
            raise FileFormatError(
                f"{path}: damaged, or not a safetensors file (its header would have {length} bytes). "
                "Save the model again."
            )
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except FileFormatError:
        raise
    except PermissionError as error:
        raise FileFormatError(f"{path}: cannot be read ({error.strerror}). Change its permissions.") from error
    except (safetensors.SafetensorError, *_RAISED) as error:
        if isinstance(error, OSError) and error.errno:
            raise FileFormatError(f"{path}: cannot be read ({error.strerror}).") from error
        raise FileFormatError(
            f"{path}: damaged, or not a safetensors file ({shown(str(error), 200)}). Save the model again."
        ) from error
    return tensors, metadata


def check_digest(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Raise `FileFormatError` if the content is not what was written."""
    described = {key: value for key, value in metadata.items() if key != DIGEST}
    if metadata.get(DIGEST) != content_digest(tensors, described):
        raise FileFormatError(
            f"{path}: damaged: its content does not have the digest that was written with it. "
            "Load another copy of the file, or save the model again."
        )


def content_digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 over names, dtypes, shapes, bytes and metadata, whatever their order in the file."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        said = json.dumps([name, _CODES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape)])
        digest.update(f"{len(said)}:{said}".encode())
        digest.update(_memory(tensor))
    digest.update(json.dumps(dict(metadata), sort_keys=True).encode())
    return digest.hexdigest()


def _memory(tensor: Tensor) -> memoryview:
    """A tensor's bytes, not copied where they lie in order."""
    flat: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(flat)
