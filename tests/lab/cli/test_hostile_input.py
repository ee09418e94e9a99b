"""What nobody should type, and names that lie: each ends in one clear line, and a terminal obeys none of it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dropconnectpp
from dropconnectpp.errors import FileWriteError
from dropconnectpp.lab.config import experiments
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store

LONG = "a" * 300
DIGITS = "9" * 5000


def refused(answer: tuple[int, str, str], text: str) -> None:
    code, out, err = answer
    assert code == 1
    assert err.startswith("Error:")
    assert text in " ".join(err.split())
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    "words",
    [
        ("run", "mine.toml", "--out", LONG),
        ("run", LONG),
        ("report", "--out", LONG),
        ("results", "--out", LONG),
        ("store", "verify", LONG),
        ("store", "merge", LONG, LONG),
        ("store", "release", LONG),
        ("train", "--model", LONG, "--dataset", "tiny"),
        ("data", "verify", f"folder:{LONG}"),
        ("data", "list", "--data-dir", LONG),
        ("data", "fetch", "svhn", "--from", LONG),
    ],
    ids=" ".join,
)
def test_a_name_that_is_too_long_is_told(dcpp, words):
    refused(dcpp(*words), "File name too long")


@pytest.mark.parametrize(
    "words",
    [
        ("data", "list", "--data-dir", "~nosuchuser"),
        ("data", "fetch", "svhn", "--from", "~nosuchuser/x"),
        ("data", "verify", "folder:~nosuchuser/x"),
        ("store", "verify", "~nosuchuser/x"),
    ],
    ids=" ".join,
)
def test_a_home_that_is_none_is_told(dcpp, words):
    refused(dcpp(*words), "there is no home folder of that name. Give the whole path.")


def test_a_home_that_is_none_is_told_where_the_environment_names_it(dcpp, monkeypatch):
    monkeypatch.setenv("DCPP_DATA", "~nosuchuser")
    refused(dcpp("data", "list"), "~nosuchuser: there is no home folder of that name.")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--first-replica", "9" * 30), "first_replica must be at least 0 and leave room for repeats below 2^63"),
        (("--first-replica", str(2**63 - 1)), "first_replica must be at least 0 and leave room for repeats"),
        (("--repeats", "100000000"), "repeats must be at most 10,000, got 100000000. Train more in several runs"),
        (("--step-size", DIGITS), "step_size must be finite, got inf"),
        (("--seed", "9" * 400), "root_seed must lie in [0, 2^63)"),
        (("--dataset", "folder:a\0b"), "is no path: it holds a zero byte"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_absurd_numbers_are_told(dcpp, options, text):
    refused(dcpp("run", "table1", "--dataset", "tiny", *options), text)


def test_a_time_limit_of_any_length_is_none(dcpp):
    code, _, err = dcpp("run", "mine.toml", "--time-limit", f"{DIGITS}h")
    assert (code, err.count("Traceback")) == (0, 0)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (f"[protocol.training]\nstep_size = {'9' * 400}.5", "step_size must be finite, got inf"),
        ("repeats = " + "[" * 5000, "its lists and tables are too deep"),
        (f"repeats = {DIGITS}", "cannot be read"),
        ('[protocol."a\\u001b[31m\\n"]', r"protocol.a\x1b[31m\n is no setting"),
        ("[sparsity]", "sparsity.keep must be given."),
    ],
    ids=["400 digits", "deep", "5000 digits", "an escape", "a setting that is missing"],
)
def test_absurd_files_are_told(dcpp, content, text):
    Path("absurd.toml").write_text(content)
    refused(dcpp("run", "absurd.toml"), text)


# ------------------------------------------------------------------------------------------ terminals


def test_names_of_folders_reach_no_terminal_as_orders(dcpp, tmp_path, monkeypatch):
    images = tmp_path / "im\x1b[31m\ng"
    for label in ("a", "b"):
        for index in range(10):
            (images / label).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(images / label / f"{index}.png")
    for words in (("fetch", f"folder:{images}"), ("verify", f"folder:{images}"), ("fetch", f"folder:{images}\x1b]0;x")):
        _, out, err = dcpp("data", *words)
        assert "\x1b" not in out + err
        assert r"im\x1b[31m" in out + err
    monkeypatch.setenv("DCPP_DATA", str(tmp_path / "\x1b[31mdata"))
    assert "\x1b" not in dcpp("data", "list")[1]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert "\x1b" not in dcpp("data", "where", "svhn")[1]


def test_labels_and_results_reach_no_terminal_as_orders(dcpp, tmp_path):
    protocol, me = experiments.demo().protocols[0], Owner.here()
    (out := tmp_path / "o\x1b[31mut").mkdir()
    with Store.open(out / "results.sqlite") as store:
        digest = store.add(protocol)
        for key in store.claim([(digest, 0), (digest, 1)], me):
            results = {"accuracy": 50.0, "nll": 1.0, "losses": [1.0], "text\x1b[31m": "\x1b]0;title\x07"}
            store.finish(key, me, "done", results=results, seconds=1.0, device="cpu", provenance={"source": "\x1b[2J"})
        store.write_note(digest, "command", "dcpp \x1b[31m")
    shown = [dcpp("results", "--out", str(out), "--format", kind) for kind in ("table", "csv", "json")]
    shown += [dcpp("report", "--out", str(out)), dcpp("store", "verify", str(out)), dcpp("store", "release", str(out))]
    for code, said, err in shown:
        assert code == 0
        assert "\x1b" not in said + err
    assert b"\x1b" not in (out / "tables.md").read_bytes()


# ---------------------------------------------------------------------------------- what was trained


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_a_model_that_cannot_be_written_is_told_before_the_training(dcpp):
    answer = dcpp("train", "--model", "/proc/net.safetensors", "--dataset", "tiny", "--epochs", "1")
    refused(answer, "/proc/net.safetensors: cannot be written")
    assert "epoch" not in answer[2]


def test_a_model_that_is_a_read_only_file_is_told_and_kept(dcpp, monkeypatch):
    Path("net").write_bytes(b"mine")
    real = Path.open

    def closed(path: Path, mode: str = "r", *arguments: object) -> object:
        if path.name == "net" and mode == "rb+":
            raise PermissionError(13, "Permission denied")
        return real(path, mode, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "open", closed)
    refused(dcpp("train", "--model", "net", "--dataset", "tiny"), "net: cannot be written (Permission denied)")
    assert Path("net").read_bytes() == b"mine"


def test_a_network_that_can_no_longer_be_written_is_kept_elsewhere(dcpp, monkeypatch, tmp_path):
    real, kept = dropconnectpp.save, tmp_path / "kept"
    kept.mkdir()

    def full(model: object, path: Path) -> None:
        if path.name == "net":
            raise FileWriteError(f"{path}: cannot be written (No space left on device).")
        real(model, path)  # type: ignore[arg-type]

    monkeypatch.setattr(dropconnectpp, "save", full)
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: os.fspath(kept))
    answer = dcpp("train", "--model", "net", "--dataset", "tiny", "--epochs", "1")
    assert answer[0] == 1
    assert f"The trained network is not lost: {kept / 'network.safetensors'} holds it." in answer[2]
    assert (kept / "network.safetensors").stat().st_size > 0
