"""Work done in processes whose disk fails on demand: at the n-th write, sync, rename or removal in one folder.

`Faulty` starts a process under `disk_faults.c`, which stands between it and the C library, so that the calls of SQLite
count as Python's do. That process imports what the work needs and forks for each piece of work.

    with Faulty(["dropconnectpp.lab.runs.store"]) as faulty:
        calls = faulty.run(fill_store, folder, root=folder).calls
        for at in range(1, calls + 1):
            end = faulty.run(fill_store, folder, root=folder, fault=Fault(at, "full"))
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

SOURCE = Path(__file__).with_name("disk_faults.c")
LONGEST_S = 300
How = Literal["error", "full", "half", "kill"]
KINDS: dict[How, int] = {"error": 1, "full": 2, "half": 3, "kill": 4}
"""What happens at the call: an error once; no space from there on; half of a write, then an error; SIGKILL."""
SUPPORTED = sys.platform == "linux" and struct.calcsize("P") == 8 and shutil.which("cc") is not None


@dataclass(frozen=True)
class Fault:
    """Which call fails, counted from 1, and how."""

    at: int
    how: How = "error"


@dataclass(frozen=True)
class End:
    """How a piece of work ended."""

    calls: int
    """Calls that count, up to the end."""
    value: Any = None
    error: str = ""
    """The type and text of what it raised."""
    ours: bool = False
    """Whether that is an error of dropconnectpp."""
    trace: str = ""
    failed: str = ""
    """The call that failed, and its file."""
    killed: bool = False

    @property
    def well(self) -> bool:
        """Whether it returned."""
        return not self.error and not self.killed


def library() -> Path:
    """`disk_faults.c`, compiled; compiled once for a source."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    made = Path(tempfile.gettempdir()) / f"disk_faults_{os.getuid()}_{digest}.so"
    if not made.exists():
        new = made.with_suffix(f".{os.getpid()}")
        options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(["cc", *options, "-o", str(new), str(SOURCE), "-ldl"], check=True)
        os.replace(new, made)
    return made


def mark(word: str) -> None:
    """Leave a word in the log, for work that says what it has finished; without a log it says nothing."""
    shim = ctypes.CDLL(None)
    if hasattr(shim, "disk_faults_mark"):
        shim.disk_faults_mark(word.encode())


class Faulty:
    """A process that does work in forks of itself, each with a fault of its own or none."""

    def __init__(self, imports: Sequence[str] = (), **environment: str) -> None:
        made = library()
        path = os.pathsep.join([str(SOURCE.parent), *filter(None, sys.path)])
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import injection; injection.serve()", str(made), *imports],
            env={**os.environ, "PYTHONPATH": path, "LD_PRELOAD": str(made), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Faulty:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # it ends where its input does

    def run(
        self,
        work: Callable[..., Any],
        *arguments: Any,
        root: Path,
        fault: Fault | None = None,
        log: Path | None = None,
    ) -> End:
        """Call a function of a module; calls for files under ``root`` count, and are logged if ``log`` is given."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        order = (work, arguments, str(root.resolve()), fault, None if log is None else str(log))
        _send(stdin, pickle.dumps(order))
        size = stdout.read(8)
        assert size, "the process that does the work has ended"
        end = pickle.loads(stdout.read(struct.unpack("<q", size)[0]))
        assert isinstance(end, End)
        return end


def _send(stream: IO[bytes], message: bytes) -> None:
    stream.write(struct.pack("<q", len(message)) + message)
    stream.flush()


def serve() -> None:
    """Do the work that stdin sends, one piece after the other, each in a fork."""
    shim = ctypes.CDLL(sys.argv[1])
    shim.disk_faults_failed.restype = ctypes.c_char_p
    shim.disk_faults_calls.restype = ctypes.c_long
    shim.disk_faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_char_p]
    orders, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what the work prints is no answer
    os.environ.pop("LD_PRELOAD", None)  # what it starts is left alone
    for name in sys.argv[2:]:
        importlib.import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # a fork does not have its parent's threads
    while size := orders.read(8):
        order = pickle.loads(orders.read(struct.unpack("<q", size)[0]))
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _work(shim, writing, *order)
        os.close(writing)
        with os.fdopen(reading, "rb") as stream:
            told = stream.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            end = pickle.loads(told)
        else:
            fault: Fault | None = order[3]
            end = End(fault.at if fault else 0, killed=True, failed=f"ended with {code}")
        _send(answers, pickle.dumps(end))


def _work(
    shim: ctypes.CDLL,
    writing: int,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    root: str,
    fault: Fault | None,
    log: str | None,
) -> NoReturn:
    """Do one piece of work in this process, tell how it ended, and end."""
    from dropconnectpp.errors import DropConnectError

    signal.alarm(LONGEST_S)
    value, error, ours, trace = None, "", False, ""
    at, kind = (fault.at, KINDS[fault.how]) if fault else (0, 0)
    shim.disk_faults_arm(root.encode(), at, kind, log.encode() if log else None)
    try:
        value = work(*arguments)
    except BaseException as raised:
        error, trace = f"{type(raised).__name__}: {raised}", traceback.format_exc()
        ours = isinstance(raised, DropConnectError)
    calls, failed = shim.disk_faults_calls(), shim.disk_faults_failed().decode()
    shim.disk_faults_disarm()
    with os.fdopen(writing, "wb") as stream:
        stream.write(pickle.dumps(End(calls, value, error, ours, trace, failed)))
    os._exit(0)
