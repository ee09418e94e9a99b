"""A display that remembers what it was told."""

from __future__ import annotations

from dropconnectpp.lab.runs.progress import Display


class Diary(Display):
    """Remembers what was shown."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.groups: list[tuple[int, int]] = []
        self.epochs: list[int] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def group(self, title: str, replicas: int, epochs: int, done: int) -> None:
        self.groups.append((replicas, done))

    def epoch(self, done: int, loss: float, accuracy: float | None) -> None:
        self.epochs.append(done)
