"""What a run shows: plain lines for a log, bars for a terminal, and text from outside as it is."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator

import pytest
from rich.console import Console

from dropconnectpp.lab.cli import display as module
from dropconnectpp.lab.cli.display import Bars, Lines, make_progress


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock.monotonic)
    return clock


@pytest.fixture
def log(clock) -> tuple[Lines, Callable[[], list[str]]]:
    stream = io.StringIO()
    lines = Lines(Console(file=stream, force_terminal=False, width=40))
    return lines, lambda: stream.getvalue().splitlines()


@pytest.fixture
def terminal() -> Iterator[tuple[Bars, Callable[[], str]]]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    with make_progress(console) as progress:

        def shown() -> str:
            stream.seek(0)
            stream.truncate()
            progress.refresh()
            return stream.getvalue()

        yield Bars(progress), shown


# ---------------------------------------------------------------------------------------------- lines


def test_a_log_says_what_begins_and_how_it_ends(log, clock):
    lines, text = log
    lines.group("cifar10: Dropout", 8, 10, 0)
    clock.now = 5.0
    lines.epoch(10, 1.23456, 71.25)
    assert text() == ["cifar10: Dropout: 8 replicas, 10 epochs", "  epoch 10/10, loss 1.235, accuracy 71.2%, 0 s left"]


def test_a_log_speaks_only_now_and_then_and_tells_the_time_left(log, clock):
    lines, text = log
    lines.group("cifar10: Dropout", 8, 100, 0)
    for epoch in range(1, 11):
        clock.now = 5.0 * epoch
        lines.epoch(epoch, 2.0, None)
    assert text()[1:] == ["  epoch 4/100, loss 2.000, 480 s left", "  epoch 8/100, loss 2.000, 460 s left"]


def test_a_log_tells_of_a_part_of_an_epoch_only_where_epochs_are_long(log, clock):
    lines, text = log
    lines.group("cifar10: Dropout", 8, 100, 0)
    for clock.now, done in ((19.0, 1), (22.0, 2)):
        lines.epoch(done, 2.0, None)
        clock.now += 2.0
        lines.within(done + 0.01)
    clock.now = 60.0
    lines.within(2.5)
    assert text()[1:] == ["  epoch 2/100, loss 2.000, 18 min left", "  epoch 3/100, 50% done, 39 min left"]


def test_a_log_counts_a_resumed_stack_from_where_it_stands(log, clock):
    lines, text = log
    clock.now = 1000.0
    lines.group("cifar10: Dropout", 1, 100, 60)
    clock.now = 1020.0
    lines.epoch(70, 2.0, None)
    assert text() == [
        "cifar10: Dropout: 1 replica, 100 epochs, resumed after epoch 60",
        "  epoch 70/100, loss 2.000, 60 s left",
    ]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_log_says_that_a_loss_is_not_finite(log, loss):
    lines, text = log
    lines.group("x", 1, 1, 0)
    lines.epoch(1, loss, 10.0)
    assert text()[1] == "  epoch 1/1, loss not finite, accuracy 10.0%, 0 s left"


@pytest.mark.parametrize("title", ["folder:[red]a[/red]: [b]", "folder:cat: DropConnect++", "a\\[b]\\"])
def test_a_log_takes_no_text_for_markup_or_emoji(log, title):
    lines, text = log
    lines.note(title)
    lines.group(title, 2, 3, 0)
    assert text() == [title, f"{title}: 2 replicas, 3 epochs"]


def test_a_log_does_not_break_or_colour_its_lines(log):
    lines, text = log
    lines.note("word 12.5 " * 20)
    assert text() == ["word 12.5 " * 20]


def test_a_log_keeps_quiet_about_the_rest(log):
    lines, text = log
    lines.evaluating("evaluating", 1, 2)
    lines.group_finished()
    assert text() == []


# ----------------------------------------------------------------------------------------------- bars


def test_before_anything_begins_there_is_no_bar(terminal):
    _, shown = terminal
    assert "/" not in shown()


def test_a_bar_shows_title_epochs_loss_and_accuracy(terminal):
    bars, shown = terminal
    bars.group("cifar10: Dropout", 8, 10, 0)
    assert "cifar10: Dropout, 8 replicas" in shown()
    bars.epoch(3, 1.23456, 71.25)
    text = shown()
    assert "3/10" in text
    assert "loss 1.235, accuracy 71.2%" in text


def test_the_last_accuracy_stays_beside_each_new_loss(terminal):
    bars, shown = terminal
    bars.group("x", 8, 10, 0)
    bars.epoch(1, 3.0, None)
    assert "loss 3.000 " in shown()
    bars.epoch(2, 2.0, 50.0)
    bars.epoch(3, 1.0, None)
    assert "loss 1.000, accuracy 50.0%" in shown()


def test_a_bar_tells_the_time_left_once_it_is_known(clock, terminal):
    bars, shown = terminal
    bars.group("x", 1, 4, 0)
    assert "left" not in shown()
    clock.now = 30.0
    bars.epoch(1, 1.0, 50.0)
    assert "90 s left" in shown()


def test_the_time_left_is_that_of_all_stacks_not_of_one(clock, log, terminal):
    lines, text = log
    bars, shown = terminal
    for display in (lines, bars):
        clock.now = 0.0
        display.work(2 * 10 + 6 * 10)
        display.group("first", 2, 10, 0)
        clock.now = 20.0  # 20 of 80 epochs
        display.epoch(10, 2.0, None)
        display.group_finished()
        display.group("second", 6, 10, 0)
        clock.now = 50.0  # 50 of 80 epochs
        display.epoch(5, 2.0, None)
    assert text() == [
        "first: 2 replicas, 10 epochs",
        "  epoch 10/10, loss 2.000, 60 s left",
        "second: 6 replicas, 10 epochs",
        "  epoch 5/10, loss 2.000, 30 s left",
    ]
    assert "30 s left" in shown()


def test_at_80_columns_the_title_has_a_line_of_its_own_and_the_bar_takes_the_rest(clock):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system=None)
    with make_progress(console) as progress:
        bars = Bars(progress)
        bars.group("cifar10: No regularization, DropConnect++ (straight-through, hyper=optimal) and 7 more", 50, 100, 0)
        clock.now = 60.0
        bars.epoch(50, 2.345, 45.6)
        stream.seek(0)
        stream.truncate()
        progress.refresh()
        lines = [
            line for line in re.sub("\x1b\\[[0-9;?]*[A-Za-z]|\r", "", stream.getvalue()).splitlines() if line.strip()
        ]
    title, bar = lines
    assert title.startswith("cifar10: No regularization, DropConnect++")
    assert title.rstrip().endswith("…"), "a title that is too long ends in an ellipsis"
    assert {len(title), len(bar)} == {80}
    for told in ("50/100", "loss 2.345, accuracy 45.6%", "60 s left"):
        assert told in bar
    assert bar.count("━") + bar.count("╸") + bar.count("╺") > 15, "an elastic bar"


def test_steps_of_other_work_have_their_own_time_left(clock, log, terminal):
    lines, text = log
    bars, shown = terminal
    for display in (lines, bars):
        for done in range(5):
            clock.now = 10.0 * done
            display.steps(f"network {done}", done, 4)
            if done == 2:
                told = shown()
    assert text() == [
        "  network 0, 0/4",
        "  network 2, 2/4, 20 s left",
        "  network 4, 4/4, 0 s left",
    ]
    for one in ("network 2", "2/4", "20 s left"):
        assert one in told


def test_a_resumed_bar_starts_where_it_stands_and_shows_its_loss_at_once(terminal):
    bars, shown = terminal
    bars.group("x", 1, 100, 60)
    text = shown()
    assert "60/100" in text
    assert "x, 1 replica\n" in text
    bars.epoch(61, 2.5, None)
    assert "loss 2.500" in shown()


def test_the_next_stack_takes_the_bars_place(terminal):
    bars, shown = terminal
    bars.group("first", 2, 10, 0)
    bars.epoch(10, 1.0, 99.0)
    bars.evaluating("evaluating", 1000, 10_000)
    assert "evaluating 1,000/10,000" in shown()
    bars.group_finished()
    bars.group("second", 2, 10, 0)
    text = shown()
    assert "second" in text
    assert "first" not in text
    bars.epoch(1, 2.0, None)
    assert "99.0%" not in shown()


def test_a_bar_says_that_a_loss_is_not_finite(terminal):
    bars, shown = terminal
    bars.group("x", 1, 2, 0)
    bars.epoch(1, math.nan, None)
    assert "loss not finite" in shown()


@pytest.mark.parametrize("title", ["folder:[red]a[/red]: [b]", "folder:cat: DropConnect++", "{task.total}"])
def test_a_bar_takes_no_text_for_markup_or_emoji(terminal, title):
    bars, shown = terminal
    bars.group(title, 2, 3, 0)
    assert f"{title}, 2 replicas" in shown()


def test_a_note_stays_above_the_bar_as_it_is():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=40, color_system=None)
    with make_progress(console) as progress:
        bars = Bars(progress)
        bars.group("x", 1, 2, 0)
        bars.note("[red]going on with 4[/red] :cat:")
    assert "[red]going on with 4[/red] :cat:\n" in stream.getvalue()


def test_a_long_epoch_is_heard_of_within(log, clock):
    lines, text = log
    lines.group("cifar10: Dropout", 8, 10, 0)
    lines.within(0.25)
    clock.now = module.LINE_EVERY_S
    lines.within(2.5)
    lines.within(2.75)
    clock.now = 2 * module.LINE_EVERY_S
    lines.evaluating("evaluating", 1000, 10_000)
    assert text()[1:] == ["  epoch 3/10, 50% done, 60 s left", "  evaluating 1,000/10,000"]


def test_the_end_of_an_epoch_belongs_to_it(log, clock):
    lines, text = log
    lines.group("svhn: Dropout", 1, 1, 0)
    for turn, done in enumerate((0.0, 1.0), 1):
        clock.now = turn * module.LINE_EVERY_S
        lines.within(done)
    assert text() == ["svhn: Dropout: 1 replica, 1 epoch", "  epoch 1/1, 0% done", "  epoch 1/1, 100% done, 0 s left"]


def test_a_bar_moves_within_an_epoch(terminal):
    bars, _ = terminal
    bars.group("cifar10: Dropout", 8, 10, 2)
    bars.within(2.5)
    assert bars.progress.tasks[-1].completed == 2.5


def test_rounds_of_timing_are_heard_of(log, clock, terminal):
    lines, text = log
    lines.timing(1, 31)
    clock.now = 21.0
    lines.timing(2, 31)
    assert text() == ["  round 2/31, 10 min left"]
    bars, shown = terminal
    bars.timing(2, 31)
    assert "timing" in shown()
    assert "2/31" in shown()


def test_a_terminal_gets_bars(monkeypatch, capsys):
    monkeypatch.setattr(module, "Console", lambda stderr: Console(stderr=stderr, force_terminal=True, width=90))
    with module.run_display() as display:
        display.group("tiny: Dropout", 2, 3, 0)
        display.epoch(3, 1.0, 50.0)
    assert "tiny: Dropout, 2 replicas" in capsys.readouterr().err
