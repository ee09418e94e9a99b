"""`dcpp`, the command of the laboratory: it gathers the commands and turns our errors into one line."""

from __future__ import annotations

import inspect
import sys

# The modules of the commands import torch, matplotlib and scipy inside their functions, where they are needed: torch
# alone takes seconds, and `dcpp --help`, `dcpp data` and a mistyped path should be answered at once.


def as_help(docstring: str | None) -> str:
    """A docstring whose paragraphs a terminal of any width may break; examples keep their lines.

    >>> as_help("One.\\n\\n    Two\\n    lines.\\n\\n      dcpp demo\\n\\n    ")
    'One.\\n\\nTwo lines.\\n\\n  dcpp demo'
    """
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(one if one.startswith(" ") else " ".join(one.split("\n")) for one in paragraphs)


def main() -> None:
    """Run `dcpp`. An error of ours ends it with one clear line and exit code 1, without a traceback."""
    try:
        import typer
        from rich.console import Console
        from rich.markup import escape
    except ImportError as error:
        print(f"dcpp needs {error.name}. Install it with: pip install 'dropconnectpp[lab]'", file=sys.stderr)
        raise SystemExit(1) from None
    from dropconnectpp.errors import DropConnectError
    from dropconnectpp.lab.cli import data, results, run, status, store, train, tune
    from dropconnectpp.lab.machine.terminal_text import printable

    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    for command in (run.demo, run.run, train.train, tune.tune, results.report, results.results, status.status):
        app.command(help=as_help(command.__doc__))(command)
    app.add_typer(data.app, name="data")
    app.add_typer(store.app, name="store")
    app.callback()(run.root)
    try:
        app()
    except DropConnectError as error:
        Console(stderr=True).print(
            f"[bold red]Error:[/] {escape(printable(str(error)))}", highlight=False, soft_wrap=True, emoji=False
        )
        raise SystemExit(1) from None
    except OSError as error:  # the file system's own, such as a name that is too long
        if error.filename is None:
            raise
        said = printable(f"{error.filename}: {error.strerror}. Give another path, or check the disk.")
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(said)}", highlight=False, soft_wrap=True, emoji=False)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
