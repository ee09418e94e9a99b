"""`dcpp data` as a user types it."""

from __future__ import annotations

import builtins

import pytest
from rich.console import Console

from dropconnectpp.lab import data
from dropconnectpp.lab.cli import console
from dropconnectpp.lab.cli import main as cli


def test_help_teaches(dcpp):
    assert "data" in dcpp("--help")[1]
    code, out, _ = dcpp("data", "fetch", "--help")
    assert code == 0
    assert "dcpp data fetch norb --from" in out
    assert "--accept-unverified" in out


def test_list_shows_every_set_and_its_state(dcpp, tmp_path):
    code, out, _ = dcpp("data", "list")
    assert code == 0
    assert all(name in out for name in data.CATALOGUE)
    assert "embedded" in out
    assert "not fetched" in out
    place = tmp_path / "cache" / "svhn"
    place.mkdir(parents=True)
    (place / "description.json").write_text("{")
    assert "damaged: fetch it with --force" in dcpp("data", "list")[1]


def test_fetch_where_and_verify_of_own_images(dcpp, tmp_path):
    from PIL import Image

    for label in ("a", "b"):
        (tmp_path / "mine" / label).mkdir(parents=True)
        for index in range(10):
            Image.new("RGB", (32, 32)).save(tmp_path / "mine" / label / f"{index}.png")
    name = f"folder:{tmp_path / 'mine'}"
    assert dcpp("data", "where", name)[0] == 1
    code, out, err = dcpp("data", "fetch", name)
    assert (code, err.strip()) == (0, "reading images")
    assert "2 classes" in out
    code, out, _ = dcpp("data", "where", name)
    assert code == 0
    assert out.strip().startswith(str(tmp_path / "cache"))
    assert "as it was prepared" in dcpp("data", "verify", name)[1]


def test_the_embedded_set_is_where_the_package_is(dcpp):
    assert dcpp("data", "where", "fashion-mini")[1].strip().endswith("data")
    assert "7,500" not in dcpp("data", "fetch", "fashion-mini")[2]


def test_an_error_is_one_line_and_exit_code_1(dcpp):
    code, out, err = dcpp("data", "fetch", "imagenet")
    assert (code, out) == (1, "")
    assert err.startswith("Error: There is no data set 'imagenet'.")
    assert "Traceback" not in err
    assert dcpp("data", "verify", "cifar10")[0] == 1


def test_text_from_outside_is_not_taken_for_markup(dcpp):
    assert "'[red]no[/red]'" in dcpp("data", "fetch", "[red]no[/red]")[2]


def test_control_c_is_quiet(dcpp, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "fetch", interrupt)
    code, _, err = dcpp("data", "fetch", "cifar10")
    assert code == 130
    assert "Traceback" not in err


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(console, "Console", lambda stderr: Console(stderr=stderr, force_terminal=True, width=80))
    with console.step_display() as show:
        show("train_32x32.mat", 50, 100)
        show("train_32x32.mat", 100, 100)
        show("checking [this]", 0, None)
    assert "checking [this]" in capsys.readouterr().err


def test_a_machine_without_typer_is_told_what_to_install(monkeypatch, capsys):
    real = builtins.__import__

    def without(name: str, *arguments: object, **options: object) -> object:
        if name == "typer":
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit):
        cli.main()
    assert "pip install 'dropconnectpp[lab]'" in capsys.readouterr().err
