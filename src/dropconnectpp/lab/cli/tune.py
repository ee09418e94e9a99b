"""`dcpp tune`: find the fastest launches of the kernels on this GPU and keep them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dropconnectpp.errors import ArgumentError, MissingPackageError
from dropconnectpp.lab.cli.console import counted, step_display
from dropconnectpp.lab.cli.options import DeviceName, duration
from dropconnectpp.lab.config.settings import ProtocolError

if TYPE_CHECKING:
    import torch

    from dropconnectpp.lab.kernels.launch_config import Launch, Launches
    from dropconnectpp.lab.tuning.tuning import Choice


def tune(
    device: DeviceName = "auto",
    time_limit: Annotated[
        str, typer.Option("--time-limit", help="Stop measuring after this time and use what was found: 90s, 2m.")
    ] = "2m",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure and show the results, but write nothing.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--every", help="Show every candidate with its time, or why it was rejected.")
    ] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove the settings found before, and measure nothing.")
    ] = False,
) -> None:
    """Find the fastest settings of the dense layer's kernels on this GPU, and keep them for later runs.

    Run nothing else on the GPU meanwhile: it would slow the kernels that are timed.

    Tune before an experiment, not during one: other settings add numbers in another order, which changes last digits.

    The kernels come with tile sizes that were chosen on an H200. This command alone measures others.

    A setting is kept if it reproduces plain PyTorch's results to rounding and saves at least 2% of the time.

    The settings apply to this GPU model, this version of Triton and these kernels.

    They go to a file in your cache folder. DCPP_LAUNCHES names another file; "off" reads and writes none.

    Examples:

      dcpp tune

      dcpp tune --dry-run --time-limit 1m

      dcpp tune --forget
    """
    from dropconnectpp.lab import device as devices
    from dropconnectpp.lab.kernels import launch_config
    from dropconnectpp.lab.tuning import tuning

    if forget and dry_run:
        raise ProtocolError("--forget removes a file, and --dry-run writes nothing. Use only one of them.")
    deadline = time.monotonic() + duration(time_limit)
    card = devices.choose(device)
    _check(card)
    path = _file_of(card)
    kept = None if dry_run else _to_change(path, forget)
    if kept is not None and forget:
        print(f"{'Removed' if _remove(kept) else 'There is none to remove'}: {kept}")
        return
    made_for, replicas = launch_config.card(card), tuning.replicas_that_fit(card)
    present = _present(path, made_for)
    choices, stopped = _measured(present, card, replicas, deadline)
    if choices:
        _show(choices, f"{devices.describe(card)}, {replicas} replicas, batch {tuning.BATCH}")
    for choice in choices if every else ():
        _show_tried(choice)
    if _tell(choices, stopped) and kept is not None:
        with _writing(kept):
            launch_config.write(kept, tuning.chosen(present, choices), made_for)
        print(f"Written: {kept}")
    else:
        print("Nothing was written.")
    if stopped:
        raise KeyboardInterrupt


# ----------------------------------------------------------------------------------------------- the card


def _check(card: torch.device) -> None:
    """Raise an error that says why there is nothing to tune, if there is not."""
    from dropconnectpp.lab import device as devices
    from dropconnectpp.lab.kernels.support import has_triton

    if card.type != "cuda":
        raise ProtocolError("dcpp tune measures on a CUDA device, and got a CPU. Run it on a machine with a GPU.")
    if not has_triton():
        raise MissingPackageError("dcpp tune needs Triton. Install it with: pip install triton")
    if not devices.tensor_cores(card):
        raise ProtocolError(
            f"{devices.describe(card)} has no bf16 matrix products and does not use these kernels. "
            "There is nothing to tune."
        )


def _measured(present: Launches, card: torch.device, replicas: int, deadline: float) -> tuple[list[Choice], bool]:
    """The choices made, and whether Ctrl-C came before the end: minutes of measuring are not wasted."""
    from dropconnectpp.lab.tuning import tuning

    bench_of, found = partial(tuning.Bench, device=card, replicas=replicas), []
    with step_display() as progress:
        try:
            for choice in tuning.tune(present, bench_of, deadline=deadline, progress=progress):
                found.append(choice)
        except KeyboardInterrupt:
            return found, True
    return found, False


# ----------------------------------------------------------------------------------------------- the file


def _file_of(card: torch.device) -> Path | None:
    from dropconnectpp.lab.kernels import launch_config

    try:
        return launch_config.file_of(card)
    except RuntimeError as error:
        named = os.environ.get(launch_config.VARIABLE)
        what = (
            f"{launch_config.VARIABLE} is {named!r}, which is not a path here" if named else "there is no cache folder"
        )
        raise ProtocolError(f"{what} ({error}). Name a file with {launch_config.VARIABLE}.") from error


def _to_change(path: Path | None, forget: bool) -> Path:
    """The file to write or remove. Raises before minutes of measuring if it cannot be written or removed."""
    from dropconnectpp.lab.kernels import launch_config

    if path is None:
        use = "Unset it." if forget else "Unset it, or use --dry-run."
        raise ProtocolError(f"{launch_config.VARIABLE} is 'off': no file is read or written. {use}")
    if not launch_config.is_ours(path):
        raise ProtocolError(
            f"{path}: is not a file of launches, and dcpp tune neither replaces nor removes it. "
            f"Name another with {launch_config.VARIABLE}, or remove it yourself."
        )
    if not forget:
        with _writing(path):
            launch_config.try_to_write(path)
    return path


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    from dropconnectpp.lab.kernels import launch_config

    try:
        yield
    except OSError as error:
        raise ProtocolError(
            f"{path}: cannot be written ({error}). Name another with {launch_config.VARIABLE}."
        ) from error


def _present(path: Path | None, made_for: dict[str, str]) -> Launches:
    """The launches to beat. Unlike `launch_config.of`, it does not advise running the command that is running."""
    from dropconnectpp.lab.kernels import launch_config

    try:
        return launch_config.DEFAULTS if path is None else launch_config.read(path, made_for)
    except FileNotFoundError:
        return launch_config.DEFAULTS
    except (OSError, ArgumentError) as error:
        print(f"{path}: cannot be used, so the defaults are to be beaten: {error}")
        return launch_config.DEFAULTS


def _remove(path: Path) -> bool:
    """Remove the file; return whether there was one."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ProtocolError(f"{path}: cannot be removed ({error.strerror}).") from error
    return True


# ------------------------------------------------------------------------------------------ what is shown


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
    left_out = []
    if unfit:
        left_out.append(f"{counted(unfit, 'candidate')} that {'does' if unfit == 1 else 'do'} not fit this card")
    if wrong:
        left_out.append(f"{counted(wrong, 'candidate')} whose results differ from plain PyTorch's")
    if left_out:
        print(f"Left out: {', '.join(left_out)}.")


def _show_tried(choice: Choice) -> None:
    for launch, found in choice.tried:
        how = _changes(choice.before, launch) or "as before"
        print(f"{choice.group.title}; {how}: {found if isinstance(found, str) else f'{found:.4g} µs'}")


def _tell(choices: Sequence[Choice], stopped: bool) -> bool:
    """Say what was not timed. Return whether anything was; raise if nothing was, unless Ctrl-C is the reason."""
    timed = [choice for choice in choices if choice.after_us is not None]
    failures = [choice.failure for choice in choices if choice.failure]
    for failure in failures:
        print(failure)
    if missed := len(choices) - len(timed) - len(failures):
        print(f"{counted(missed, 'kernel')} {'was' if missed == 1 else 'were'} not reached: use a longer --time-limit.")
    if stopped:
        print("Stopped. What was found until then is used." if timed else "Stopped before anything was found.")
    elif not timed:
        reason = "See above what failed." if failures else "Use a longer --time-limit."
        raise ProtocolError(f"No kernel could be timed, and nothing was written. {reason}")
    return bool(timed)


def _chosen(choice: Choice) -> str:
    if choice.after_us is None:
        return "failed" if choice.failure else "not reached"
    return _changes(choice.before, choice.after) or "as before"


def _changes(before: Launch, after: Launch) -> str:
    old = vars(before)
    changed = {name: value for name, value in vars(after).items() if value != old[name]}
    return ", ".join("no limit on registers" if value is None else f"{name} {value}" for name, value in changed.items())
