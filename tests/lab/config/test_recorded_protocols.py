"""Every protocol of the records: its settings parse, and give the digest and the label that they had.

A digest is the identity of stored runs, so this file only ever grows. Add the protocols of new records with:
python tests/lab/config/test_recorded_protocols.py
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dropconnectpp.lab.config.ensembles import Ensemble
from dropconnectpp.lab.config.json_values import canonical, to_json
from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.config.settings import from_dict
from dropconnectpp.lab.config.uci import Regression

GOLDEN = Path(__file__).parent / "golden" / "recorded_protocols.json.gz"
RECORDS = Path(__file__).parents[3] / "records"


def golden() -> dict[str, dict[str, Any]]:
    """Settings and label by digest."""
    found: dict[str, dict[str, Any]] = json.loads(gzip.decompress(GOLDEN.read_bytes()))
    return found


def protocol_of(settings: dict[str, Any]) -> tuple[Protocol | Regression | Ensemble, str]:
    """What the settings are of, and its label."""
    if settings.get("benchmark") == "ensemble":
        ensemble = from_dict(Ensemble, {name: value for name, value in settings.items() if name != "data"})
        return ensemble, ensemble.label
    if "benchmark" in settings:
        benchmark = from_dict(Regression, settings)
        return benchmark, benchmark.label
    protocol = from_dict(Protocol, settings)
    return protocol, protocol.method.label


def content(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def stored_settings() -> Iterator[tuple[str, str]]:
    """Digest and settings of each protocol in each recorded store, as they were written."""
    for path in sorted(RECORDS.rglob("*.jsonl.xz")):
        for line in lzma.decompress(path.read_bytes()).splitlines():
            if protocol := json.loads(line).get("protocol"):
                yield protocol["digest"], canonical(protocol["settings"])


def tabled_digests() -> set[str]:
    """Digests in the recorded tables of rows."""
    found: set[str] = set()
    for path in sorted([*RECORDS.rglob("*.csv"), *RECORDS.rglob("*.csv.gz")]):
        rows = csv.DictReader(io.StringIO(content(path).decode()))
        if "digest" in (rows.fieldnames or ()):
            found |= {row["digest"] for row in rows}
    return found


def test_recorded_settings_keep_their_digest_and_label():
    recorded = golden()
    assert len(recorded) >= 442
    for digest, known in recorded.items():
        protocol, label = protocol_of(known["settings"])
        assert protocol.digest == digest
        assert label == known["label"]
        # Text and not mappings: 1 and 1.0 are equal, and have other digests.
        assert to_json(protocol.to_dict(), "settings") == to_json(known["settings"], "settings")


@pytest.mark.skipif(not RECORDS.is_dir(), reason="needs the records, which a wheel does not carry")
def test_every_protocol_of_the_records_is_known():
    known = {digest: to_json(one["settings"], "settings") for digest, one in golden().items()}
    stored = list(stored_settings())
    assert stored
    for digest, settings in stored:
        assert known[digest] == settings
    assert tabled_digests() <= known.keys()


def _add_new_records() -> None:
    known = golden() if GOLDEN.exists() else {}
    for digest, settings in stored_settings():
        if digest not in known:
            plain = json.loads(settings)
            known[digest] = {"label": protocol_of(plain)[1], "settings": plain}
    text = json.dumps(known, sort_keys=True, separators=(",", ":"))
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    _add_new_records()
