"""Who owns work in a store: a process, distinguished from one that reused its number, and whether it still lives."""

from __future__ import annotations

import os
import socket
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from dropconnectpp.lab.config.json_values import canonical


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process that owns rows while it runs them. `Owner.here()` makes a new one for this process."""

    host: str
    system: str
    """The boot and the process namespace: pids can be compared only where host and system agree, so a container
    that borrows its host's name counts as another machine."""
    pid: int
    start: str
    """When the process started, so that a reused pid is not taken for it; empty where unknown."""
    nonce: str
    """Distinguishes several owners in one process, such as threads."""

    @classmethod
    def here(cls) -> Owner:
        pid = os.getpid()
        start = _process_start(pid) or ""
        return cls(host=socket.gethostname(), system=_system(), pid=pid, start=start, nonce=uuid.uuid4().hex)

    @property
    def name(self) -> str:
        """Its name in the file."""
        return canonical(asdict(self))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_dead(self, silent_s: float, lease_s: float) -> bool:
        """Whether the process is gone or, where this machine cannot see that, was silent for too long."""
        if (self.host, self.system) == (socket.gethostname(), _system()):
            start = _process_start(self.pid)
            if start is None:
                return True
            if start and self.start:
                return start != self.start
        return silent_s > lease_s


@cache
def _system() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_start(pid: int) -> str | None:
    """When a process of this machine started, as the kernel writes it: None if it is gone, empty if unknown."""
    with suppress(OSError):
        # The name in parentheses may hold anything, parentheses too; state and start time come after it.
        parts = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if parts[0] in (b"Z", b"X") else parts[19].decode()
    if os.name == "nt":
        return ""  # there os.kill would end it
    # Also on Linux: /proc may hide the processes of other users.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return ""
