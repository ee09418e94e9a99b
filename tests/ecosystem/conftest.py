"""What the tests find of each model and tool goes into one file, where `DROPCONNECTPP_OUTCOMES` names one."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

Record = Callable[[str, str, str, str], None]
COLUMNS = ("kind", "name", "aspect", "outcome")
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "lightning",
    "accelerate",
    "skorch",
    "pytorch-ignite",
    "scikit-learn",
    "onnx",
)

_found: list[tuple[str, str, str, str]] = []


@pytest.fixture
def record(record_property: Callable[[str, Any], None]) -> Record:
    """Note an outcome: "yes", or what stands in the way. It travels in the test's report, also between processes."""

    def note(kind: str, name: str, aspect: str, outcome: str) -> None:
        record_property("outcome", (kind, name, aspect, " ".join(outcome.split())))

    return note


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        _found.extend(tuple(value) for key, value in report.user_properties if key == "outcome")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    place = os.environ.get("DROPCONNECTPP_OUTCOMES")
    if place is None or exitstatus != 0 or hasattr(session.config, "workerinput"):  # what worked stays published
        return
    with Path(place).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(("package", package, "version", _version(package)) for package in PACKAGES)
        writer.writerows(sorted(_found))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
