"""Preparing and opening a data set, on a tiny archive: each piece of work is timed."""

from __future__ import annotations

from pathlib import Path

from benchmark_cases import tables


def test_data_preparation(tmp_path: Path) -> None:
    found = tables("benchmarks/data_preparation.py", tmp_path, "--images", "60", "--repeats", "1")
    works = [row["work"] for row in found["60 images"]]
    assert works == ["unpack", "checksum", "prepare", "open", "open and read", "verify"]
