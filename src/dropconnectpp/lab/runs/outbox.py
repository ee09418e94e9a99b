"""Rows that a worker has finished and the driver has not stored yet: on disk, so that no driver's death loses them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from dropconnectpp.lab.config.json_values import decode, to_json
from dropconnectpp.lab.machine.whole_files import write_whole
from dropconnectpp.lab.runs.checkpoints import stack_name
from dropconnectpp.lab.runs.rows import FINAL, Key
from dropconnectpp.lab.runs.storage import Place, StorageError
from dropconnectpp.lab.runs.tasks import Finished

SUFFIX = ".rows"


class Outbox:
    """A folder with a file for each task that is finished and not stored."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def put(self, keys: Sequence[tuple[str, int]], rows: Sequence[Finished]) -> None:
        """Keep all rows of a task.

        Raises:
            StorageError: they cannot be written.
        """
        text = to_json([asdict(row) for row in rows], "rows").encode()
        name, sealed = _name(keys), text + b"\n" + hashlib.sha256(text).hexdigest().encode() + b"\n"
        try:
            self._place.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._place.folder / name, sealed)
        except OSError as error:
            raise StorageError(f"{self._place.folder / name}: cannot be written ({error.strerror}).") from error
        self._place.publish(name)

    def find(self, keys: Sequence[tuple[str, int]]) -> list[Finished] | None:
        """The rows of a task that an earlier attempt finished, if they are all as they were written."""
        name = _name(keys)
        if name not in self._place.names():
            return None
        rows = self._read(name)
        return rows if rows is not None and [row.key for row in rows] == [Key(*key) for key in keys] else None

    def all(self) -> Iterator[list[Finished]]:
        """The rows of each task; a file that is not what was written is passed over, since its work can be redone."""
        for name in self._place.names():
            if name.endswith(SUFFIX) and (rows := self._read(name)) is not None:
                yield rows

    def remove(self, keys: Sequence[tuple[str, int]]) -> None:
        """Forget rows that are stored."""
        self._place.remove([_name(keys)])

    def _read(self, name: str) -> list[Finished] | None:
        self._place.fetch([name])
        try:
            text, _, digest = (self._place.folder / name).read_bytes().rstrip(b"\n").rpartition(b"\n")
            if hashlib.sha256(text).hexdigest().encode() != digest:
                return None
            plain = decode(json.loads(text))
            rows = [Finished(**one | {"key": Key(*one["key"])}) for one in plain]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return rows if all(row.status in FINAL for row in rows) else None


def _name(keys: Sequence[tuple[str, int]]) -> str:
    return stack_name(keys) + SUFFIX
