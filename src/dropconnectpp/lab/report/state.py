"""Where the runs of a folder of results stand, read from its store and from what runs write beside it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dropconnectpp.lab.machine.user_paths import expanded
from dropconnectpp.lab.report.views.cells import TableView
from dropconnectpp.lab.report.views.runs import lay_out_runs, run_lines
from dropconnectpp.lab.runs import status
from dropconnectpp.lab.runs.database import StoreError
from dropconnectpp.lab.runs.store import Content, Holder, Store


@dataclass(frozen=True)
class State:
    """Where runs stand."""

    lines: tuple[str, ...]
    tables: tuple[TableView, ...]
    going: bool
    """Whether a run goes on."""

    @property
    def shown(self) -> bool:
        """Whether a page has anything to tell: it says nothing of runs that ended well."""
        return self.going or bool(self.tables)


def state_of(store_path: Path | str) -> State:
    """The state of a folder of results.

    Raises:
        StoreError: there is no store to read.
    """
    path = expanded(store_path)
    with Store.open(path, read_only=True) as store:
        return state_from(store, store.content())


def state_from(store: Store, content: Content) -> State:
    """The state of a store's folder, from what was read of it; where that is damaged, of what can be read."""
    holders: list[Holder] = []
    with suppress(StoreError):
        holders = store.holders()
    statuses = status.read(store.path.parent)
    going = any(not one.is_gone() for one in statuses) or any(not one.is_dead() for one in holders)
    lines = tuple(run_lines(statuses, content.rows, holders))
    return State(lines, tuple(lay_out_runs(statuses, content.rows)), going)
