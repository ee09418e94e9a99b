"""`dcpp tune`: what fits the kernels to a card."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dropconnectpp.errors import MissingPackageError
from dropconnectpp.lab.data_commands import step_display
from dropconnectpp.lab.protocol import ProtocolError
from dropconnectpp.lab.run_commands import DeviceName, duration

if TYPE_CHECKING:
    import torch

    from dropconnectpp.lab.kernels.launches import Launch
    from dropconnectpp.lab.tuning import Choice


def tune(
    device: DeviceName = "auto",
    time_limit: Annotated[
        str, typer.Option("--time-limit", help="Measure no further after this time: 90s, 2m. What is found, counts.")
    ] = "2m",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and show, and write nothing.")] = False,
    every: Annotated[bool, typer.Option("--every", help="Show every candidate, with its time or its fault.")] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove what was found before, and measure nothing.")
    ] = False,
) -> None:
    """Find out how this GPU runs the dense layer's kernels fastest, and keep it for every later run.

    The kernels come with tiles that were chosen on an H200. Others are tried; one that gives the same numbers to
    rounding and saves at least 2% is kept, in a file of your cache folder for this card and version of Triton.
    Nothing is measured at any other time. DCPP_LAUNCHES names another file, or is "off" for the defaults.

    A tuned card adds up in another order: tune before an experiment, not in its middle. Examples:

      dcpp tune

      dcpp tune --dry-run --time-limit 1m

      dcpp tune --forget
    """
    from dropconnectpp.lab import device as devices
    from dropconnectpp.lab import tuning
    from dropconnectpp.lab.kernels import launches

    deadline = time.monotonic() + duration(time_limit)
    card = devices.choose(device)
    _check(card)
    path = launches.file_of(card)
    if path is None and (forget or not dry_run):
        raise ProtocolError(f"{launches.VARIABLE} is 'off': no file is read or written. Unset it, or use --dry-run.")
    if path is not None and forget:
        print(f"{'Removed' if _remove(path) else 'There is none to remove'}: {path}")
        return
    present, replicas = launches.of(card), tuning.replicas_that_fit(card)
    with step_display() as progress:
        choices = tuning.tune(
            present,
            partial(tuning.Bench, device=card, replicas=replicas),
            deadline=deadline,
            progress=progress,
        )
    _show(choices, f"{devices.describe(card)}, {replicas} replicas, batch {tuning.BATCH}")
    for choice in choices if every else ():
        for launch, found in choice.tried:
            how = _changes(choice.before, launch) or "as before"
            print(f"{choice.group.title}; {how}: {found if isinstance(found, str) else f'{found:.4g} µs'}")
    failures = [choice.failure for choice in choices if choice.failure]
    for failure in failures:
        print(failure)
    if len(failures) == len(choices):
        raise ProtocolError("No kernel could be timed, and nothing was written.")
    if path is None or dry_run:
        print("Nothing was written.")
        return
    try:
        launches.write(path, tuning.chosen(present, choices), launches.card(card))
    except OSError as error:
        raise ProtocolError(f"{path}: cannot be written ({error}). Name another with {launches.VARIABLE}.") from error
    print(f"Written: {path}")


def _check(card: torch.device) -> None:
    """Whether there is something to tune, or an error that says why not."""
    from dropconnectpp.lab import device as devices
    from dropconnectpp.lab.kernels.compiled import compiled

    if card.type != "cuda":
        raise ProtocolError("dcpp tune measures on a CUDA device, and got a CPU. Run it on a machine with a GPU.")
    if compiled("layer") is None:
        raise MissingPackageError("dcpp tune needs Triton. Install it with: pip install triton")
    if not devices.tensor_cores(card):
        raise ProtocolError(
            f"{devices.describe(card)} has no bf16 products and does not use these kernels: there is nothing to tune."
        )


def _remove(path: Path) -> bool:
    """Whether there was such a file."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ProtocolError(f"{path}: cannot be removed ({error.strerror}).") from error
    return True


def _show(choices: Sequence[Choice], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("kernel", "before µs", "after µs", "ratio", "chosen"):
        table.add_column(column, justify="right" if column in ("before µs", "after µs", "ratio") else "left")
    for choice in choices:
        before, after = choice.before_us, choice.after_us
        ratio = None if before is None or after is None else after / before
        figures = ("-" if one is None else f"{one:.4g}" for one in (before, after, ratio))
        table.add_row(choice.group.title, *figures, _chosen(choice))
    Console().print(table)
    unfit, wrong = sum(choice.unfit for choice in choices), sum(choice.wrong for choice in choices)
    if unfit or wrong:
        print(f"Left out: {unfit} candidates that do not fit this card, {wrong} with other numbers than the twin's.")


def _chosen(choice: Choice) -> str:
    if choice.after_us is None:
        return "failed" if choice.failure else "not reached"
    return _changes(choice.before, choice.after) or "as before"


def _changes(before: Launch, after: Launch) -> str:
    old = vars(before)
    return ", ".join(f"{name} {value or 'any'}" for name, value in vars(after).items() if value != old[name])
