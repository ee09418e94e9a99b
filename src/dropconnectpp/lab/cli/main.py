"""`dcpp`, the laboratory's command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `dcpp`; an error of ours is one clear line and exit code 1, not a traceback."""
    try:
        import typer
        from rich.console import Console
    except ImportError as error:
        print(f"dcpp needs {error.name}. Install it with: pip install 'dropconnectpp[lab]'", file=sys.stderr)
        raise SystemExit(1) from None
    from dropconnectpp.errors import DropConnectError
    from dropconnectpp.lab.cli import data as data_commands
    from dropconnectpp.lab.cli import results as result_commands
    from dropconnectpp.lab.cli import run as run_commands
    from dropconnectpp.lab.cli import tune as tune_commands

    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    app.command()(run_commands.demo)
    app.command()(run_commands.run)
    app.command()(run_commands.train)
    app.command()(tune_commands.tune)
    app.command()(result_commands.report)
    app.command()(result_commands.results)
    app.add_typer(data_commands.app, name="data")
    app.add_typer(result_commands.store_app, name="store")
    app.callback()(run_commands.root)
    try:
        app()
    except DropConnectError as error:
        Console(stderr=True).print(
            f"[bold red]Error:[/] {_escape(str(error))}", highlight=False, soft_wrap=True, emoji=False
        )
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
