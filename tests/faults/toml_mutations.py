"""Damages to experiments in TOML files, and what reading them comes to: an experiment, or an error of one line."""

from __future__ import annotations

import json
import math
import random
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from damage import BYTES, Found, changed_json, damaged

from dropconnectpp.lab.config import experiments
from dropconnectpp.lab.config.json_values import canonical, check_text
from dropconnectpp.lab.config.protocol import Protocol, paper
from dropconnectpp.lab.config.settings import ProtocolError, from_dict
from dropconnectpp.lab.replicas.network import Shape

FOLDER = Path(__file__).parents[2] / "experiments"
SLOWEST_S = 10.0
LONGEST = 1500
"""Letters of an error that somebody still reads."""
WORDS = (
    *(
        "0",
        "-1",
        "nan",
        "-inf",
        "1e400",
        "9" * 4000,
        "9" * 5000,
        "0x" + "f" * 400,
        "1.0e-400",
        "true",
        '""',
        '"\\u001b[31m"',
        "{}",
    ),
    *("[]", "[[]]", "[nan]", "1979-05-27T07:32:00Z", "07:32:00", '"é\\u202e"', "[" * 3000 + "]" * 3000, "{a={a=1}}"),
    *('"' + "a" * 100_000 + '"', "[1, [2, [3]]]", "+0", "1_000", "'''", '"\\ud800"', "[" + "1," * 300 + "]"),
)


def other_line(text: str, rng: random.Random) -> str:
    """A line is missing, doubled, elsewhere, another file's, or without its value."""
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    kind = rng.randrange(5)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, lines[at])
    elif kind == 2:
        lines.insert(rng.randrange(len(lines)), lines.pop(at))
    elif kind == 3:
        lines.insert(at, rng.choice(rng.choice(TEXTS).splitlines()))
    else:
        lines[at] = lines[at].partition("=")[0]
    return "\n".join(lines)


def other_value(text: str, rng: random.Random) -> str:
    """A setting has another value, which TOML allows or not."""
    lines = text.splitlines()
    given = [at for at, line in enumerate(lines) if "=" in line]
    at = rng.choice(given)
    name, _, value = lines[at].partition("=")
    numbers = [str(2**63), "0", str(rng.uniform(-2, 2)), f"{value.strip()}0", f"[{value}, {rng.choice(WORDS)}]"]
    lines[at] = f"{name}= {rng.choice([*WORDS, *numbers])}"
    return "\n".join(lines)


def other_tree(text: str, rng: random.Random) -> str:
    """Names, values and tables are exchanged, in TOML that is sound."""
    content = tomllib.loads(text)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        content = changed_json(content, rng)
    return written(content)


def written(content: object) -> str:
    """A table as TOML; what TOML has no word for is written as JSON has it."""
    if not isinstance(content, dict):
        return _inline(content)
    return "\n".join(f"{json.dumps(str(key))} = {_inline(value)}" for key, value in content.items())


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_inline(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value)


TREES: dict[str, Callable[[str, random.Random], str]] = {
    "another line": other_line,
    "another value": other_value,
    "another tree": other_tree,
}
TEXTS = [path.read_text() for path in sorted(FOLDER.rglob("*.toml"))]
NAMES = [path.name for path in sorted(FOLDER.rglob("*.toml"))]


def _every_setting() -> str:
    """A protocol with all of its settings spelled out."""
    return "\n".join(
        line
        for name, value in json.loads(canonical(paper("svhn", "dropconnect++").to_dict())).items()
        for line in ([f"[protocol.{name}]", *_lines(value)] if isinstance(value, dict) else [])
    )


def _lines(table: dict[str, Any]) -> list[str]:
    return [f"{name} = {_inline(value)}" for name, value in table.items() if value is not None]


class Experiments:
    """Damages experiments in a folder."""

    title = "Experiments in TOML"
    kinds = (*BYTES, *TREES)
    harmless = frozenset({"refused", "an experiment"})

    def __init__(self, folder: Path) -> None:
        self._path = folder / "mine.toml"
        self._texts = [*zip(NAMES, TEXTS, strict=True), *[("every setting", _every_setting())] * 5]

    def attack(self, number: int) -> Found:
        """Damage one and read it."""
        rng = random.Random(number)
        kind = self.kinds[number % len(self.kinds)]
        name, text = rng.choice(self._texts)
        if kind in BYTES:
            content = damaged(kind, text.encode(), rng)
        else:
            content = TREES[kind](text, rng).encode(errors="surrogatepass")
        self._path.write_bytes(content)
        begun = time.process_time()
        try:
            outcome = _read(self._path)
        except Exception as error:
            outcome = f"a raw error: {type(error).__name__}: {error!s:.300}"
        if time.process_time() - begun > SLOWEST_S:
            outcome = f"slow: {time.process_time() - begun:.0f} s"
        return Found(kind, name, outcome)


def _read(path: Path) -> str:
    """Read an experiment and do with it what comes before its first training."""
    try:
        experiment = experiments.from_file(path)
        for protocol in experiment.protocols:
            _prepare(protocol)
    except ProtocolError as error:
        if not str(error).isprintable() or len(str(error)) > LONGEST:
            return f"an error that cannot be shown: {str(error)[:300]!r}"
        return "refused"
    return "an experiment"


def _prepare(protocol: Protocol) -> None:
    """What a store and a stack do with a protocol."""
    check_text("label", protocol.label)
    again = from_dict(Protocol, json.loads(canonical(protocol.to_dict())))
    assert again.digest == protocol.digest, "another digest after it was stored"
    if protocol.architecture.layered:
        protocol.architecture.shape(3, 32 - 2 * protocol.normalisation.crop, 10).weight_layers()
    else:
        Shape(protocol.architecture, 3, 32, 10).parameters()
