"""Options that commands share: each is explained, and times are read as people write them."""

from __future__ import annotations

import pytest

from dropconnectpp.lab.cli.options import duration
from dropconnectpp.lab.config.settings import ProtocolError


@pytest.mark.parametrize("command", [["run"], ["demo"], ["train"], ["results"], ["report"], ["store", "merge"]])
def test_every_option_is_explained(dcpp, command):
    out = dcpp(*command, "--help")[1]
    options = [line.strip("│ *").split() for line in out.splitlines() if "│" in line and "--" in line[:8]]
    assert options
    for words in options:
        assert any(word[0].isupper() or word == "auto," for word in words[1:]), words
    assert "[default: the" not in out


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("1.5", 1.5), ("90s", 90.0), ("9m", 540.0), ("1h30m", 5400.0), ("2h5s", 7205.0)]
)
def test_times_are_read_as_people_write_them(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-5s", "30m1h", "1h 30m", "1d", "nan", "1e3"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ProtocolError, match="time-limit must look like 90s, 9m or 1h30m, got"):
        duration(text)
