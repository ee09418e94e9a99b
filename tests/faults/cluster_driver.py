"""`dcpp` with a checkpoint after every epoch and without a report at its end: what cluster tests start and kill."""

from __future__ import annotations

from functools import partial

from dropconnectpp.lab.cli import main, run
from dropconnectpp.lab.runs import runner

if __name__ == "__main__":
    runner.Runner = partial(runner.Runner, checkpoint_s=0.0)  # type: ignore[assignment, misc]
    run.write_report = lambda *_: None  # type: ignore[assignment]
    main.main()
