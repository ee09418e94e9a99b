"""A store as a record: its rows as compressed CSV, and every table of its report as a file of Markdown.

`python benchmarks/publish.py results.sqlite records/DATE-NAME --prefix cifar10` writes `cifar10_rows.csv.gz` and files
such as `cifar10_accuracy.md`, which `fill_docs.py` copies into the documentation. The same store gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import io
from pathlib import Path

from dropconnectpp.lab import report
from dropconnectpp.lab.result_tables import write_csv
from dropconnectpp.lab.store import Store

LARGEST_RECORD = 5_000_000
"""Bytes of a file that belongs in the repository."""


def publish(store: Path, folder: Path, prefix: str) -> list[Path]:
    """Write the record and return its files."""
    with Store.open(store, read_only=True) as opened:
        rows = io.StringIO()
        write_csv(opened.rows(), rows)
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"{prefix}_rows.csv.gz": gzip.compress(rows.getvalue().encode(), mtime=0)}
    for name, section in report.sections(store).items():
        files[f"{prefix}_{name}.md"] = f"{section}\n".encode()
    for name, content in files.items():
        if len(content) > LARGEST_RECORD:
            raise SystemExit(f"{name} would have {len(content) / 1e6:.1f} MB, and a record has 5 at most.")
        (folder / name).write_bytes(content)
    return [folder / name for name in files]


def main() -> None:
    """Publish a store."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("store", type=Path)
    options.add_argument("folder", type=Path)
    options.add_argument("--prefix", required=True)
    given = options.parse_args()
    for path in publish(given.store, given.folder, given.prefix):
        print(path)


if __name__ == "__main__":
    main()
