"""Sources in processes of their own, each a fork of one that has imported torch and Triton: the imports take seconds.

`Forked` starts that process and gives it one source at a time; run as a script, this file is that process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

LONGEST_S = 600


def environment(folders: Sequence[str], **more: str) -> dict[str, str]:
    """This process's, with folders first on the path."""
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **more}


class Forked:
    """A process that waits for sources, with Triton's kernels compiled or interpreted."""

    def __init__(self, folders: Sequence[str], interpret: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment(folders, TRITON_INTERPRET=str(int(interpret))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # it ends where its input does

    def run(self, source: str, arguments: Sequence[str], folder: Path) -> str:
        """What a source prints; it must end without an error."""
        script, printed, said = (folder / name for name in ("source.py", "printed", "said"))
        script.write_text(source)  # a file, since Triton reads a kernel's source
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(script), list(arguments), str(printed), str(said)]) + "\n")
        self._process.stdin.flush()
        code = self._process.stdout.readline().strip()
        assert code == "0", f"{code}: {said.read_text()[-2000:]}"
        return printed.read_text()


def serve() -> None:
    """Run the sources that stdin names, one a line, and print their exit codes."""
    import torch

    torch.set_num_threads(1)
    if importlib.util.find_spec("triton") is not None:
        import triton.language  # noqa: F401
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(script: str, arguments: list[str], printed: str, said: str) -> NoReturn:
    """Run a source in this process, then end it."""
    code = 1
    for file, descriptor in ((os.devnull, 0), (printed, 1), (said, 2)):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC), descriptor)
    signal.alarm(LONGEST_S)
    try:
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
