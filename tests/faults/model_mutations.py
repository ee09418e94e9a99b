"""Damages to model files, each a function of a number, and what `load` makes of them.

A file is damaged as disks and networks do it, its bytes changed and the digest left: `load` must refuse it, or give
back what was saved. Or it is changed as somebody could who knows the format, and gets the digest that it needs: `load`
must refuse it and leave the model as it was, or give a model that works.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from damage import BYTES, SILENT, Found, changed_json, damaged
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.errors import FileFormatError
from dropconnectpp.io import container
from saved_cases import GOLDEN

SLOWEST_S = 10.0


@dataclass(frozen=True)
class Victim:
    """A file to damage, and what it should say."""

    name: str
    content: bytes
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    architecture: Callable[[], nn.Module]
    input: Tensor


def victims(folder: Path) -> list[Victim]:
    """Files of every kind of layer and of every way to store a tensor."""
    made: dict[str, tuple[nn.Module, Callable[[], nn.Module], tuple[int, ...]]] = {}
    for name, (make, architecture) in GOLDEN.items():
        made[name] = make(), architecture, (2, 3) if name == "tied" else (2, 1, 4, 4)
    for name, options in PRUNED.items():
        torch.manual_seed(1)
        made[name] = dcpp.prune(_trained(dcpp.convert(_dense(), **options)), keep=0.05), _dense, (2, 40)
    made["dense"] = dcpp.to_dense(made["few"][0]), _dense, (2, 40)
    made["compact"] = dcpp.compact(made["few"][0].eval()), _dense, (2, 40)
    found = []
    for name, (model, architecture, shape) in made.items():
        path = folder / f"{name}.safetensors"
        dcpp.save(model, path, dtype=torch.float16 if name == "half" else None)
        tensors, metadata = container.read(path)
        metadata.pop(container.DIGEST)
        found.append(Victim(name, path.read_bytes(), tensors, metadata, architecture, torch.ones(shape)))
    return found


PRUNED: dict[str, dict[str, Any]] = {
    "few": {},
    "shared": {"hyper": "optimal", "sharing": "unit"},
    "half": {"parameterisation": "probability"},
    "fixed": {"kind": "dropconnect", "keep_probability": 0.5},
}


def _dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 10))


def _trained(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


# ------------------------------------------------------------------------------- the bytes alone


def reworded(victim: Victim, rng: random.Random) -> bytes:
    """The header says something else of the same bytes."""
    length = int.from_bytes(victim.content[:8], "little")
    header = json.loads(victim.content[8 : 8 + length])
    changed = changed_json(header, rng)
    text = json.dumps(changed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    announced = len(text) if rng.random() < 0.9 else rng.choice([0, 1, 2**25 + 1, 2**63, 2**64 - 1, len(text) + 8])
    return announced.to_bytes(8, "little") + text + victim.content[8 + length :]


# -------------------------------------------------------------------------- with the right digest


def retold(victim: Victim, rng: random.Random) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The description of the layers says something else."""
    described = json.loads(victim.metadata["description"])
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        described = changed_json(described, rng)
    return victim.tensors, {**victim.metadata, "description": json.dumps(described)}


def rewritten(victim: Victim, rng: random.Random) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The description is other text, or the metadata have other entries."""
    text = victim.metadata["description"]
    at, other = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    deep = 10 ** rng.randint(1, 5)
    texts = (
        text[:at] + text[other:],
        text[:other] + text[at:],
        text[:at] + chr(rng.randrange(0x250)) + text[at + 1 :],
        "[" * deep + "]" * deep,
        '{"layers":' * deep + "1" + "}" * deep,
        text.replace("1.0", "1e400"),
        text.replace("1.0", "9" * 5000),
        text.replace("true", "NaN"),
        "",
        "null",
    )
    metadata = dict(victim.metadata)
    if rng.random() < 0.8:
        return victim.tensors, {**metadata, "description": rng.choice(texts)}
    key = rng.choice(list(metadata))
    if rng.random() < 0.5:
        metadata[rng.choice(["layers", "aliases", "\x1b[2J", key.upper()])] = metadata.pop(key)
    else:
        metadata[key] = rng.choice(["1", "2", "3", "", "{}", "[]", text, text * 2])
    return victim.tensors, metadata


def restored(victim: Victim, rng: random.Random) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors are others: their names, shapes, kinds or values."""
    tensors = dict(victim.tensors)
    for _ in range(rng.choice([1, 1, 2])):
        if tensors:
            name = rng.choice(list(tensors))
            rng.choice([_renamed, _removed, _reshaped, _recast, _revalued, _exchanged])(tensors, name, rng)
    return tensors, victim.metadata


def _renamed(tensors: dict[str, Tensor], name: str, rng: random.Random) -> None:
    ends = ("_kept", "_logit", ":values", ":positions", ".", "..", "", ".0", "\x1b]0;x\x07", "/../x", "é" * 300)
    other = rng.choice([name + rng.choice(ends), name.rpartition(".")[2], f"0.{name}", name.upper()])
    tensors[other] = tensors.pop(name) if rng.random() < 0.5 else tensors[name]


def _removed(tensors: dict[str, Tensor], name: str, rng: random.Random) -> None:
    del tensors[name]


def _reshaped(tensors: dict[str, Tensor], name: str, rng: random.Random) -> None:
    value = tensors[name]
    ways = (
        value.flatten(),
        value[None],
        value.flatten()[:-1],
        value[..., None],
        value.new_zeros(0),
        value.new_ones(()),
    )
    tensors[name] = rng.choice(
        [*ways, torch.cat([value.flatten(), value.flatten()]), value.mT if value.ndim > 1 else value]
    )


def _recast(tensors: dict[str, Tensor], name: str, rng: random.Random) -> None:
    tensors[name] = tensors[name].to(rng.choice([torch.float64, torch.float16, torch.bool, torch.int64, torch.uint8]))


def _revalued(tensors: dict[str, Tensor], name: str, rng: random.Random) -> None:
    raw = tensors[name].clone().contiguous()
    if raw.numel():
        raw.view(-1).view(torch.uint8)[rng.randrange(raw.numel() * raw.element_size())] = rng.randrange(
            2 if raw.dtype == torch.bool else 256
        )
    tensors[name] = raw


def _exchanged(tensors: dict[str, Tensor], name: str, rng: random.Random) -> None:
    other = rng.choice(list(tensors))
    tensors[name], tensors[other] = tensors[other], tensors[name]


# ------------------------------------------------------------------------------------ one mutation

SEALED: dict[str, Callable[[Victim, random.Random], tuple[dict[str, Tensor], dict[str, str]]]] = {
    "another description, sealed": retold,
    "other text, sealed": rewritten,
    "other tensors, sealed": restored,
}
HEADER = "another header"
KINDS = (*BYTES, HEADER, *SEALED)


class Models:
    """Damages model files in a folder."""

    title = "Model files"
    kinds = KINDS
    harmless = frozenset({"refused", "the same", "another model"})
    """What may come of a damaged file. Anything else is a fault."""

    def __init__(self, folder: Path) -> None:
        self._victims, self._path = victims(folder), folder / "attacked.safetensors"

    def attack(self, number: int) -> Found:
        """Damage a file and load it: all of it follows from ``number``."""
        rng = random.Random(number)
        kind, victim, path = KINDS[number % len(KINDS)], rng.choice(self._victims), self._path
        if kind in SEALED:
            tensors, metadata = SEALED[kind](victim, rng)
            try:
                container.write(path, {k: v.contiguous() for k, v in tensors.items()}, metadata)
            except UnicodeEncodeError:  # no file can have such a name
                path.write_bytes(b"")
        else:
            header = 8 + int.from_bytes(victim.content[:8], "little")
            content = victim.content
            while content == victim.content:
                content = reworded(victim, rng) if kind == HEADER else damaged(kind, victim.content, rng, first=header)
            path.write_bytes(content)
        converted = rng.random() < 0.3
        begun = time.process_time()
        try:
            outcome = _loaded(victim, path, converted, kind not in SEALED)
        except Exception as error:
            outcome = f"a raw error: {type(error).__name__}: {error}"
        if time.process_time() - begun > SLOWEST_S:
            outcome = f"slow: {time.process_time() - begun:.0f} s"
        return Found(kind, victim.name, outcome)


def _loaded(victim: Victim, path: Path, converted: bool, by_accident: bool) -> str:
    target = victim.architecture()
    if converted and victim.name in PRUNED:
        target = dcpp.convert(target, **PRUNED[victim.name])
    before = _all_of(target)
    try:
        model = dcpp.load(path, target)
    except FileFormatError as error:
        if not str(error).isprintable() or len(str(error)) > 1500:
            return f"an error that cannot be shown: {str(error)!r}"
        if _all_of(target) != before:
            return f"refused, and the model was changed: {error}"
        return "refused"
    if by_accident:
        (good := path.with_suffix(".good")).write_bytes(victim.content)
        again = victim.architecture()
        if converted and victim.name in PRUNED:
            again = dcpp.convert(again, **PRUNED[victim.name])
        return "the same" if _all_of(dcpp.load(good, again)) == _all_of(model) else SILENT
    for mode in (True, False):
        model.train(mode)(victim.input)
    dcpp.save(model, path.with_suffix(".again"))
    return "another model"


def _all_of(model: nn.Module) -> list[Any]:
    """What a model is: its modules, their options, every bit of its state."""
    return [
        [(name, type(module), _options(module)) for name, module in model.named_modules(remove_duplicate=False)],
        [
            (key, value.dtype, tuple(value.shape), value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
            for key, value in model.state_dict().items()
        ],
    ]


def _options(module: nn.Module) -> str:
    return repr(module.options()) if hasattr(module, "options") else module.extra_repr()
