"""`dcpp store`: merge stores of results, check them, and free the work of processes that are gone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dropconnectpp.lab.cli.console import counted, say, warn
from dropconnectpp.lab.cli.results import make_folder
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.runs.store import MENDING, Content, Holder, Store

app = typer.Typer(
    no_args_is_help=True, help="Merge stores of results, check them, and free the work of machines that are gone."
)


@app.command()
def merge(
    into: Annotated[Path, typer.Argument(help="Folder or store file that receives the rows.", show_default=False)],
    others: Annotated[list[Path], typer.Argument(help="Folders or store files to add.", show_default=False)],
    leave_out_damaged: Annotated[
        bool, typer.Option("--leave-out-damaged", help="Merge what is sound of a store that has damaged records.")
    ] = False,
) -> None:
    """Merge results from several machines without duplicating a row.

    A row that differs from the receiver's is a conflict: the receiver's is kept, and the command ends with exit code 1.

    All of a store is checked before anything of it is written. One with damaged records is refused.

    Examples:

      dcpp store merge all machine1 machine2

      dcpp store merge saved damaged --leave-out-damaged
    """
    if not into.is_file():
        make_folder(into)
    conflicts = 0
    with Store.open(into if into.is_file() else into / "results.sqlite") as store:
        for other in others:
            merged = store.merge(_file(other), leave_out_damaged=leave_out_damaged)
            conflicts += len(merged.conflicts)
            say(
                f"{other}: {len(merged.added)} rows added, {len(merged.already_there)} already there, "
                f"{len(merged.conflicts)} in conflict (ours kept)"
                + (f", {len(merged.mended)} mended" if merged.mended else "")
                + (f", {len(merged.left_out)} damaged left out" if merged.left_out else "")
            )
            for damage in merged.left_out:
                warn(f"{other}: left out: {damage}")
    if conflicts:
        raise typer.Exit(1)


@app.command()
def verify(
    stores: Annotated[list[Path], typer.Argument(help="Folders or store files to check.", show_default=False)],
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove damaged records: the command that made them makes them again.")
    ] = False,
) -> None:
    """Compare every record with the digest that was written with it, and check the file as a whole.

    Each damaged record is named, and the command ends with exit code 1. Records of version 0.1 have no digest: their
    form is checked, and they are counted as unverified.

    Examples:

      dcpp store verify dcpp-results

      dcpp store verify dcpp-results --remove
    """
    damaged = 0
    for path in stores:
        with Store.open(_file(path), read_only=not remove) as store:
            content = store.content()
            _describe(path, content)
            if remove and content.damaged:
                store.remove(content.damaged)
                left = store.content().damaged
                say(f"{path}: {counted(len(content.damaged) - len(left), 'record')} removed")
                if left:
                    warn(
                        f"{path}: the file itself is damaged. Save what is sound in it: "
                        f"dcpp store merge NEW {path} --leave-out-damaged"
                    )
                damaged += len(left)
            else:
                damaged += len(content.damaged)
    if damaged:
        if not remove:
            warn(f"{MENDING}.")
        raise typer.Exit(1)


def _describe(path: Path, content: Content) -> None:
    for damage in content.damaged:
        warn(f"{path}: damaged: {damage}")
    sound = ", ".join(
        counted(len(found), noun)
        for found, noun in ((content.rows, "row"), (content.notes, "note"), (content.protocols, "protocol"))
    )
    without = sum(record.sealed is None for record in content.sound if "running" not in record.values)
    unverified = f"; {counted(without, 'record')} without a digest, unverified" if without else ""
    say(f"{path}: {sound} sound, {counted(len(content.damaged), 'record')} damaged{unverified}")


@app.command()
def release(
    store: Annotated[Path, typer.Argument(help="Folder or store file.", show_default=False)],
    host: Annotated[
        str | None, typer.Option("--host", help="Free the work of all processes of this machine.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Free the work of all processes.")] = False,
) -> None:
    """Free work that processes hold which are gone, so that others take it.

    Without options it lists who holds work, and frees nothing. A run frees by itself what processes of its own machine
    left, and those of another machine that were silent for ten minutes; but a machine whose clock ran ahead seems alive
    for longer. A process that does live notices that it lost its work and goes on with other work.

    Example:

      dcpp store release dcpp-results --host worker3
    """
    if host is not None and everything:
        raise ProtocolError("--host and --all exclude each other. Leave one out.")
    with Store.open(_file(store), read_only=host is None and not everything) as opened:
        holders = opened.holders()
        for holder in holders:
            say(f"{holder}: {counted(holder.rows, 'row')}, {_heard(holder)}")
        if not holders:
            say(f"{store}: no process holds work")
            return
        if host is None and not everything:
            say("Free it with --host NAME or --all.")
            return
        chosen = [holder for holder in holders if everything or holder.host == host]
        if not chosen:
            raise ProtocolError(
                f"--host {host}: no process of this machine holds work. Those that do are listed above."
            )
        say(f"{counted(opened.free(chosen), 'row')} freed")


def _heard(holder: Holder) -> str:
    if holder.silent_s >= 0:
        return f"silent for {holder.silent_s:.0f} s"
    return f"its clock is {-holder.silent_s:.0f} s ahead" if holder.silent_s < 0 else "it was never heard of"


def _file(path: Path) -> Path:
    return path / "results.sqlite" if path.is_dir() else path
