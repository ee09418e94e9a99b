"""Kill workers, nodes and the driver of a Ray cluster with -9, again and again, and compare with one process.

    python tests/faults/cluster_kills.py --kills 30      goes on where it stopped, by build/faults/cluster.json
    python tests/faults/cluster_kills.py --only driver --kills 5

A round trains 24 networks on fashion-mini on a cluster of three nodes, which Ray's own utility starts on this machine.
At random moments a worker, a node or the driver is killed; a node comes back, and a driver is started again with the
same command. At the end every row must be there once and be what one process makes, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent)]

from tally import Tally, long_test  # noqa: E402

from dropconnectpp.lab.runs import status  # noqa: E402
from dropconnectpp.lab.runs.engines.cluster import ray_package  # noqa: E402
from dropconnectpp.lab.runs.store import Store  # noqa: E402

KINDS = ("worker", "node", "driver")
KILLS_A_ROUND = 5
MOST_STARTS = 3
"""How often the same command may be needed at the end of a round."""
LONGEST_S = 600.0
"""How long a run may take from one kill to the next, or to its end."""
EXPERIMENT = """
repeats = {repeats}

[protocol]
data = "fashion-mini"

[protocol.architecture]
maps = [4]
pooled = [true]
filter_size = 3
padding = 1
hidden = 8

[protocol.training]
step_size = 0.05
batch_size = 100
epochs = {epochs}

[protocol.evaluation]
every = 2
curve_samples = 1
samples = [1, 2]
shares = [1.0, 0.5]
predictive_samples = 2

[[methods]]
kind = "none"

[[methods]]
kind = "dropconnect++"
"""


class Ground:
    """A cluster of three nodes, and the rows that one process makes."""

    def __init__(self, cluster: Any, folder: Path, at_once: int) -> None:
        self.cluster, self.folder, self._at_once = cluster, folder, at_once
        self.nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        self.whole: dict[str, Any] = {}

    def start(self, out: Path) -> subprocess.Popen[bytes]:
        """Start the command."""
        engine = ("--engine", "ray", "--address", self.cluster.address, "--storage", out / "shared")
        return command(self.folder / "mine.toml", out, "--replicas-at-once", self._at_once, *engine)

    def working(self, out: Path, driver: subprocess.Popen[bytes]) -> list[status.Work]:
        """What workers do by the driver's own word; waits until one does anything, and is empty once all is over."""
        deadline = time.monotonic() + LONGEST_S
        while driver.poll() is None:
            for one in status.read(out):
                own = one.driver is not None and one.driver.pid == driver.pid
                busy = [work for work in one.work if own and work.pid]
                if busy:
                    return busy
            if time.monotonic() > deadline:
                driver.kill()
                raise TimeoutError((out / "said").read_text()[-2000:])
            time.sleep(0.05)
        return []

    def kill(self, kind: str, out: Path, driver: subprocess.Popen[bytes], draw: random.Random) -> bool:
        """Kill one; whether it was there to be killed."""
        busy = self.working(out, driver)
        if not busy:
            return False
        if kind == "worker":
            try:
                os.kill(draw.choice(busy).pid, signal.SIGKILL)
            except ProcessLookupError:  # it has just ended
                return False
        elif kind == "node":
            self.cluster.remove_node(self.nodes.pop(draw.randrange(len(self.nodes))), allow_graceful=False)
            self.nodes.append(self.cluster.add_node(num_cpus=1))
        else:
            driver.kill()
            driver.wait()
        return True


def command(experiment: Path, out: Path, *more: object) -> subprocess.Popen[bytes]:
    """Start a run; what it says goes into a file beside its results."""
    driver = Path(__file__).parent / "cluster_driver.py"
    own = ("run", experiment, "--out", out, "--device", "cpu", "--threads", "1", *more)
    out.mkdir(exist_ok=True)
    with (out / "said").open("ab") as said:
        return subprocess.Popen([str(one) for one in (sys.executable, driver, *own)], stdout=said, stderr=said)


@contextmanager
def ground(
    folder: Path, *, repeats: int = 12, epochs: int = 6, at_once: int = 2, head_cpus: int = 1
) -> Iterator[Ground]:
    """A cluster, and an experiment whose networks train in stacks of so many."""
    ray_package()
    from ray.cluster_utils import Cluster

    (folder / "mine.toml").write_text(EXPERIMENT.format(repeats=repeats, epochs=epochs))
    alone = command(folder / "mine.toml", folder / "whole", "--replicas-at-once", at_once)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": head_cpus, "include_dashboard": False})
    try:
        found = Ground(cluster, folder, at_once)
        if alone.wait():
            raise RuntimeError((folder / "whole" / "said").read_text()[-2000:])
        found.whole = rows(folder / "whole")
        yield found
    finally:
        alone.kill()
        cluster.shutdown()


def rows(out: Path) -> dict[str, Any]:
    """All of the rows but times and the processes that wrote them."""
    with Store.open(out / "results.sqlite", read_only=True) as store:
        return {
            f"replica {row.key.replica} of {row.key.digest}": (
                row.status,
                json.dumps(row.results, sort_keys=True),
                row.device,
                row.versions,
                row.provenance,
            )
            for row in store.rows()
        }


def run_round(
    ground: Ground, out: Path, kinds: Sequence[str], pauses: Sequence[float], draw: random.Random, tally: Tally
) -> None:
    """Train all networks, with a kill of each kind on the way, and compare."""
    driver = ground.start(out)
    for kind, pause in zip(kinds, pauses, strict=True):
        ground.working(out, driver)
        time.sleep(pause)
        tally.add(kind, "kills" if ground.kill(kind, out, driver, draw) else "ended first")
        if driver.poll() is not None:
            driver = ground.start(out)
    code = driver.wait(LONGEST_S)
    for _ in range(MOST_STARTS):
        if code == 0:
            break
        # The driver joins any node of its machine, and it may be the one that was killed: it says so and ends.
        tally.add("driver", "started again")
        code = ground.start(out).wait(LONGEST_S)
    name = f"{', '.join(kinds)}"
    if code:
        tally.faults.append(f"{name}: not resumed: exit code {code}, {(out / 'said').read_text()[-500:]}")
    found = rows(out)
    wrong = [key for key in ground.whole | found if ground.whole.get(key) != found.get(key)]
    for key in wrong:
        what = "lost" if key not in found else "doubled" if key not in ground.whole else "different"
        tally.faults.append(f"{name}: {what}: {key}")
    tally.add("rounds", "compared")
    tally.add("rounds", "faults", len(wrong))
    tally.keep()


def kill(kills: int, tally: Tally, only: str | None = None) -> None:
    """Go on until so many kills are counted."""
    kinds = KINDS if only is None else (only,)

    def done() -> int:
        return sum(tally.get(kind, "kills") for kind in kinds)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ground(Path(folder)) as made:
        while done() < kills:
            number = tally.get("rounds", "compared")
            draw = random.Random(number)
            # The kind that has the fewest comes first, then at random.
            order = sorted(kinds, key=lambda one: tally.get(one, "kills"))
            chosen = [*order, *draw.choices(kinds, k=KILLS_A_ROUND)][: min(KILLS_A_ROUND, kills - done())]
            pauses = [draw.uniform(0.0, 4.0) for _ in chosen]
            run_round(made, Path(folder) / f"round {number}", chosen, pauses, draw, tally)
            print(f"round {number}: {dict(tally.counts)}", flush=True)


def main() -> None:
    """Kill until so many are counted."""

    def work(tally: Tally, only: str | None, amount: int | None) -> None:
        kill(amount or 0, tally, only)

    path = ROOT / "build" / "faults" / "cluster.json"
    long_test(__doc__, KINDS, path, work, ("--kills", 30, "go on until so many are counted"))


if __name__ == "__main__":
    main()
