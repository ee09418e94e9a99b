"""`dcpp tune`: what it chooses, by which rules, and what it leaves behind. Never how long anything takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import layer_cases
import local_cases
import pytest
import torch
from launch_cases import HERE, OTHER
from torch import Tensor

from dropconnectpp.lab import device as devices
from dropconnectpp.lab.cli import tune as tune_commands
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.kernels import gates, launch_config, layer, local, support
from dropconnectpp.lab.kernels.launch_config import DEFAULTS, Launch, Walk
from dropconnectpp.lab.tuning import tuning
from dropconnectpp.lab.tuning.candidates import GROUPS, Group, Work
from dropconnectpp.lab.tuning.tuning import WRONG, Bench, Choice, choose, tune

CPU = torch.device("cpu")
GATES = Group("gates", "gates", (Work("gates", "score", 5),), ({"block": 512}, {"block": 2048}, {"num_warps": 8}))
DEFAULT, SHORT, LONG, WIDE = GATES.candidates


class Fake(Bench):
    """A bench with times and problems of its own; the times of a second timing may be others."""

    def __init__(self, *timings: dict[Launch, float], problems: dict[Launch, str] | None = None) -> None:
        self.timings, self.problems = iter(timings), problems or {}
        self.timed: list[list[Launch]] = []

    def problem(self, launch: Launch) -> str | None:
        return self.problems.get(launch)

    def times(self, several: Sequence[Launch]) -> list[float]:
        self.timed.append(list(several))
        found = next(self.timings)
        return [found[one] for one in several]


ALL = {DEFAULT: 100.0, SHORT: 90.0, LONG: 80.0, WIDE: 120.0}

# --------------------------------------------------------------------------------------------- the rules


def test_the_fastest_is_chosen_by_a_timing_against_the_present_one_alone() -> None:
    bench = Fake(ALL, {DEFAULT: 101.0, LONG: 82.0})
    assert choose(GATES, DEFAULT, bench) == Choice(GATES, DEFAULT, LONG, 101.0, 82.0)
    assert bench.timed == [[DEFAULT, SHORT, LONG, WIDE], [DEFAULT, LONG]]


@pytest.mark.parametrize(("us", "taken"), [(98.1, False), (98.0, True), (100.0, False), (150.0, False)])
def test_a_candidate_must_save_two_hundredths(us: float, taken: bool) -> None:
    found = choose(GATES, DEFAULT, Fake(ALL, {DEFAULT: 100.0, LONG: us}))
    assert (found.after, found.after_us) == ((LONG, us) if taken else (DEFAULT, 100.0))
    assert found.before_us == 100.0


def test_where_nothing_is_faster_all_stays_and_is_timed_once() -> None:
    bench = Fake({**ALL, DEFAULT: 70.0})
    assert choose(GATES, DEFAULT, bench) == Choice(GATES, DEFAULT, DEFAULT, 70.0, 70.0)
    assert len(bench.timed) == 1


def test_what_was_tuned_before_is_the_one_to_beat_and_the_default_a_candidate() -> None:
    present = Walk(block=256, num_warps=1)
    bench = Fake({**ALL, present: 100.0, DEFAULT: 50.0}, {present: 100.0, DEFAULT: 50.0})
    assert choose(GATES, present, bench) == Choice(GATES, present, DEFAULT, 100.0, 50.0)
    assert bench.timed[0] == [present, DEFAULT, SHORT, LONG, WIDE]


def test_what_does_not_run_or_is_wrong_is_not_timed_and_counted() -> None:
    problems = {LONG: WRONG, SHORT: "OutOfResources, shared memory"}
    bench = Fake(ALL, problems=problems)
    assert choose(GATES, DEFAULT, bench) == Choice(GATES, DEFAULT, DEFAULT, 100.0, 100.0, unfit=1, wrong=1)
    assert bench.timed == [[DEFAULT, WIDE]]


def test_what_fails_among_others_is_tried_again_alone() -> None:
    class Crowded(Fake):
        seen: frozenset[Launch] = frozenset()

        def problem(self, launch: Launch) -> str | None:
            first = launch not in self.seen
            self.seen |= {launch}
            return "SystemError" if launch == LONG and first else None

    found = choose(GATES, DEFAULT, Crowded(ALL, ALL))
    assert (found.after, found.unfit) == (LONG, 0)


def test_a_present_launch_that_does_not_run_is_replaced_by_the_fastest() -> None:
    found = choose(GATES, DEFAULT, Fake(ALL, problems={DEFAULT: "OutOfResources, registers"}))
    assert found == Choice(GATES, DEFAULT, LONG, None, 80.0, unfit=1)


def test_where_nothing_runs_the_reason_is_told() -> None:
    problems = dict.fromkeys(GATES.candidates, "RuntimeError, no kernel image")
    with pytest.raises(ProtocolError, match=r"gates: no launch works on this card\. .*no kernel image"):
        choose(GATES, DEFAULT, Fake(problems=problems))


class Lost(Fake):
    """A bench that fails while it measures."""

    error: BaseException = RuntimeError("out of memory")

    def times(self, several: Sequence[Launch]) -> list[float]:
        raise self.error


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), ValueError("out of memory"), OSError("out of memory")]
)
def test_a_group_that_fails_leaves_the_others_what_they_found(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lost, "error", error)

    benches = iter([Fake(ALL, ALL), Lost(ALL), Fake(ALL, ALL)])
    groups = [replace(GATES, title=title) for title in "abc"]
    found = tune(DEFAULTS, lambda group: next(benches), groups=groups)
    failure = f"b: {type(error).__name__}, out of memory"
    assert [(one.after, one.failure) for one in found] == [(LONG, ""), (DEFAULT, failure), (LONG, "")]


def test_an_interrupted_tuning_has_given_what_it_found() -> None:
    benches = iter([Fake(ALL, ALL), Lost(ALL)])
    found = tune(DEFAULTS, lambda group: next(benches), groups=[GATES, GATES])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lost, "error", KeyboardInterrupt())
        assert next(found).after == LONG
        with pytest.raises(KeyboardInterrupt):
            next(found)


def test_no_group_is_begun_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 9.0, 10.0])
    monkeypatch.setattr(tuning.time, "monotonic", lambda: next(clock))
    groups = [replace(GATES, title=title) for title in "abc"]
    told: list[tuple[str, int, int | None]] = []
    found = tune(
        DEFAULTS,
        lambda group: Fake(ALL, ALL),
        groups=groups,
        deadline=10.0,
        progress=lambda *how: told.append(how),
    )
    assert [(choice.after, choice.after_us) for choice in found] == [(LONG, 80.0), (LONG, 80.0), (DEFAULT, None)]
    assert told == [("a", 0, 3), ("b", 1, 3)]


def test_what_was_chosen_is_put_among_the_rest() -> None:
    present = replace(OTHER, gates=DEFAULT)
    choices = list(tune(present, lambda group: Fake(ALL, ALL), groups=[GATES]))
    assert tuning.chosen(present, choices) == replace(OTHER, gates=LONG)


def test_every_launch_is_tuned_and_every_candidate_is_another() -> None:
    assert [group.name for group in GROUPS] == list(vars(DEFAULTS))
    for group in GROUPS:
        assert len(set(group.candidates)) == len(group.candidates) > 3, group.name


# ------------------------------------------------------------------------------------------ against the twin


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small layer."""
    monkeypatch.setattr(tuning, "INPUTS", 24)
    monkeypatch.setattr(tuning, "BATCH", 6)


WORK = [Work(work.part, work.kind, 5) for group in GROUPS for work in group.work]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("work", dict.fromkeys(WORK))
def test_a_step_is_the_same_every_time_and_moves_what_it_trains(work: Work) -> None:
    start = tuning.make_step(work.kind, work.units, 2, CPU)
    first, second = (start.to(CPU).run(work.part) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(one.isfinite().all() for one in first)
    if work.part != "forward":
        moved = start.to(CPU)
        moved.run(work.part)
        for name in ("logit", "alpha", "beta"):
            learns = name in vars(start.gate) and getattr(start.gate, name) is not None
            if learns and (work.part == "gates" or "score" not in work.kind):
                assert not torch.equal(getattr(moved.gate, name), getattr(start.gate, name)), name
                assert not torch.equal(getattr(moved.update, name), getattr(start.update, name)), name
        assert torch.equal(moved.weight, start.weight) == (work.part == "gates")


KERNELS = [
    (layer, "_product_by_kernel", Work("forward", "score", 5)),
    (layer, "_backward_by_kernel_", Work("backward", "straight-through", 5)),
    (gates, "_gate_by_kernel_", Work("gates", "score, learned", 5)),
    (local, "_moments_by_kernel", Work("forward", "local", 5)),
    (local, "_backward_by_kernel_", Work("backward", "local, learned", 5)),
]


def as_kernel(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    spoil: Callable[..., Tensor],
    kl_share: float = 1.0,
) -> None:
    """In the place of a kernel, what ``spoil`` makes of the twin's result and of the arguments.

    The twin may get but a share of the KL.
    """
    public = {"_product_by_kernel": "gated_product", "_gate_by_kernel_": "update_gate_"}
    public |= {"_moments_by_kernel": "gate_moments"}
    default = "gate_moments_backward_" if module is local else "gated_product_backward_"
    twin, running = getattr(module, public.get(name, default)), []
    monkeypatch.setattr(module, "supported", lambda *_: not running)

    def kernel(*arguments: Any) -> Tensor:
        running.append(True)
        if kl_share != 1.0:
            given = (one for one in arguments if isinstance(one, gates.LearnedGate))
            other = {id(gate): replace(gate, kl_scale=kl_share * gate.kl_scale) for gate in given}
            arguments = tuple(other.get(id(one), one) for one in arguments)
        try:
            return spoil(twin(*arguments), *arguments)
        finally:
            running.pop()

    monkeypatch.setattr(module, name, kernel)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("module", "name", "work"), KERNELS)
def test_a_candidate_is_right_if_its_numbers_are_the_twins_to_rounding(
    module: Any, name: str, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(replace(GATES, work=(work,)), CPU, 2)

    def problem_of(spoil: Callable[..., Tensor]) -> str | None:
        with monkeypatch.context() as patch:
            as_kernel(patch, module, name, spoil)
            return bench.problem(DEFAULT)

    def fails(*_: object) -> Tensor:
        raise RuntimeError("out of resource: shared memory")

    def late(result: Tensor, *arguments: Any) -> Tensor:
        trained = next(value for value in arguments if isinstance(value, gates.LearnedGate)).logit
        trained[0, 0] += 0.1
        return result

    assert problem_of(lambda result, *_: result) is None
    assert problem_of(lambda result, *_: result * (1 + 1e-5)) is None
    assert problem_of(lambda result, *_: result * 1.01) == WRONG
    assert problem_of(lambda result, *_: torch.full_like(result, float("nan"))) == WRONG
    assert problem_of(fails) == "RuntimeError, out of resource: shared memory"
    if work.part != "forward":
        assert problem_of(late) == WRONG


@pytest.mark.parametrize(
    ("module", "name", "part", "kind"),
    [
        (layer, "_backward_by_kernel_", "backward", "straight-through"),
        (local, "_backward_by_kernel_", "backward", "local"),
        (local, "_backward_by_kernel_", "backward", "local, learned"),
        (gates, "_gate_by_kernel_", "gates", "score"),
        (gates, "_gate_by_kernel_", "gates", "score, learned"),
    ],
)
def test_a_candidate_that_forgets_the_kl_is_wrong(
    module: Any, name: str, part: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(part, kind, 16)  # fewer units than are tuned, with all else as there
    assert replace(work, units=layer.FEW_UNITS) in [one for group in GROUPS for one in group.work]
    bench = Bench(replace(GATES, work=(work,)), CPU, 2)
    found = []
    for share in (1.0, 0.5, 0.0):
        with monkeypatch.context() as patch:
            as_kernel(patch, module, name, lambda result, *_: result, share)
            found.append(bench.problem(DEFAULT))
    assert found == [None, WRONG, WRONG]


@pytest.mark.usefixtures("tiny")
def test_a_candidate_is_in_force_while_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(result: Tensor, *_: object) -> Tensor:
        seen.append(launch_config.of(CPU))
        return result

    bench = Bench(GATES, CPU, 2)
    as_kernel(monkeypatch, gates, "_gate_by_kernel_", look)
    for launch in (SHORT, LONG):
        assert bench.problem(launch) is None
    assert seen == [replace(DEFAULTS, gates=SHORT), replace(DEFAULTS, gates=LONG)]
    assert launch_config.of(CPU) is DEFAULTS


@pytest.mark.parametrize(("free", "replicas"), [(140e9, 50), (8e9, 47), (1e9, 5), (1e6, 2)])
def test_a_small_card_is_timed_with_fewer_replicas(free: float, replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), int(140e9)))
    assert tuning.replicas_that_fit(torch.device("cuda")) == replicas


# -------------------------------------------------------------------------------------------- the command

Dcpp = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dcpp(dcpp: Dcpp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Dcpp]:
    """The command, with a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(launch_config.VARIABLE, raising=False)
    launch_config._of_card.cache_clear()
    yield dcpp
    launch_config._of_card.cache_clear()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A made-up card, on which a long block is the fastest for gates, and its file."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(devices, "choose", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(devices, "describe", lambda device: HERE["card"])
    monkeypatch.setattr(devices, "tensor_cores", lambda device: True)
    monkeypatch.setattr(support, "has_triton", lambda: True)
    monkeypatch.setattr(launch_config, "has_triton", lambda: True)
    monkeypatch.setattr(launch_config, "card", lambda device: HERE)
    monkeypatch.setattr(tuning, "replicas_that_fit", lambda device: 50)
    monkeypatch.setattr(tuning, "Bench", lambda group, **_: Fake(ALL, ALL, problems={WIDE: WRONG, SHORT: "unfit"}))
    monkeypatch.setattr(tuning, "tune", partial(tune, groups=[GATES]))
    return tmp_path / "dropconnectpp" / "launches" / "Card-of-the-tests-triton-9.9.json"


def test_help_teaches(dcpp: Dcpp) -> None:
    assert "tune" in dcpp("--help")[1]
    code, out, _ = dcpp("tune", "--help")
    assert code == 0
    for text in ("dcpp tune --dry-run --time-limit 1m", "--device", "--forget", "DCPP_LAUNCHES", "H200"):
        assert text in out
    assert "Run nothing else on the GPU meanwhile" in out


def test_no_paragraph_of_the_help_is_broken_where_its_source_is() -> None:
    text = inspect.getdoc(tune_commands.tune)
    assert text is not None
    assert [paragraph for paragraph in text.split("\n\n") if "\n" in paragraph] == []


def test_what_is_found_is_shown_and_kept(dcpp: Dcpp, card: Path) -> None:
    code, out, err = dcpp("tune")
    assert (code, err.strip()) == (0, "gates")
    assert "Card of the tests, 50 replicas, batch 128" in out
    (line,) = (line for line in out.splitlines() if "gates" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == ["gates", "100", "80", "0.8", "block 2048"]
    assert (
        "Left out: 1 candidate that does not fit this card, 1 candidate whose results differ from plain PyTorch's.\n"
        in out
    )
    assert out.endswith(f"Written: {card}\n")
    assert launch_config.read(card, HERE) == replace(DEFAULTS, gates=LONG)


def test_every_candidate_is_shown_if_asked_for(dcpp: Dcpp, card: Path) -> None:
    _, out, _ = dcpp("tune", "--every")
    shown = [line for line in out.splitlines() if line.startswith("gates; ")]
    assert shown == [
        "gates; as before: 100 µs",
        "gates; block 512: unfit",
        "gates; block 2048: 80 µs",
        f"gates; num_warps 8: {WRONG}",
    ]
    assert "gates; " not in dcpp("tune")[1]


def test_what_is_left_out_is_counted(dcpp: Dcpp, card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = {WIDE: "unfit", SHORT: "unfit"}
    monkeypatch.setattr(tuning, "Bench", lambda group, **_: Fake(ALL, ALL, problems=problems))
    assert "Left out: 2 candidates that do not fit this card.\n" in dcpp("tune")[1]
    monkeypatch.setattr(tuning, "Bench", lambda group, **_: Fake(ALL, ALL))
    assert "Left out" not in dcpp("tune")[1]


def test_a_limit_that_is_lifted_is_told_in_words() -> None:
    before = DEFAULTS.backward
    assert tune_commands._changes(before, replace(before, num_stages=2, maxnreg=None)) == (
        "num_stages 2, no limit on registers"
    )
    assert tune_commands._changes(replace(before, maxnreg=None), before) == "maxnreg 128"


def test_where_no_kernel_can_be_timed_nothing_is_written(
    dcpp: Dcpp, card: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = dict.fromkeys(GATES.candidates, "RuntimeError, no kernel image")
    monkeypatch.setattr(tuning, "Bench", lambda group, **_: Fake(problems=problems))
    code, out, err = dcpp("tune")
    assert code == 1
    assert "gates: no launch works on this card. The one in use fails with: RuntimeError, no kernel image." in out
    assert "No kernel could be timed, and nothing was written. See above what failed." in err
    assert not card.exists()


@pytest.fixture
def short_of_time(monkeypatch: pytest.MonkeyPatch, card: Path) -> None:
    """Three kernels, of which the time suffices for one."""
    clock = iter([0.0, 0.0, 1e9, 1e9])
    monkeypatch.setattr(tuning.time, "monotonic", lambda: next(clock))
    groups = [replace(GATES, name=name) for name in ("gates", "gates_learned", "backward")]
    monkeypatch.setattr(tuning, "tune", partial(tune, groups=groups))


def test_where_no_kernel_is_reached_nothing_is_written(dcpp: Dcpp, card: Path) -> None:
    code, out, err = dcpp("tune", "--time-limit", "0s")
    assert (code, "not reached" in out) == (1, True)
    assert "1 kernel was not reached: use a longer --time-limit.\n" in out
    assert "No kernel could be timed, and nothing was written. Use a longer --time-limit." in err
    assert not card.exists()


@pytest.mark.usefixtures("short_of_time")
def test_where_some_fail_and_the_rest_is_not_reached_nothing_is_written(
    dcpp: Dcpp, card: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "Bench", lambda group, **_: Lost(ALL))
    code, out, err = dcpp("tune")
    assert (code, card.exists()) == (1, False)
    assert "gates: RuntimeError, out of memory\n2 kernels were not reached: use a longer --time-limit.\n" in out
    assert "No kernel could be timed, and nothing was written. See above what failed." in err


@pytest.mark.usefixtures("short_of_time")
def test_what_was_reached_is_kept_and_the_rest_told(dcpp: Dcpp, card: Path) -> None:
    launch_config.write(card, replace(OTHER, gates=DEFAULT), HERE)
    code, out, _ = dcpp("tune")
    assert code == 0
    assert out.endswith(f"2 kernels were not reached: use a longer --time-limit.\nWritten: {card}\n")
    assert launch_config.read(card, HERE) == replace(OTHER, gates=LONG)


@pytest.mark.parametrize("found", [0, 1])
def test_ctrl_c_keeps_what_was_found_until_then(
    found: int, dcpp: Dcpp, card: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benches = iter([Fake(ALL, ALL)] * found + [Lost(ALL)])
    monkeypatch.setattr(Lost, "error", KeyboardInterrupt())
    monkeypatch.setattr(tuning, "Bench", lambda group, **_: next(benches))
    monkeypatch.setattr(tuning, "tune", partial(tune, groups=[GATES, GATES]))
    code, out, _ = dcpp("tune")
    assert (code, card.exists()) == (130, bool(found))
    if found:
        assert out.endswith(f"Stopped. What was found until then is used.\nWritten: {card}\n")
        assert launch_config.read(card, HERE) == replace(DEFAULTS, gates=LONG)
    else:
        assert out == "Stopped before anything was found.\nNothing was written.\n"


def test_a_dry_run_writes_nothing(dcpp: Dcpp, card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = dcpp("tune", "--dry-run")
    assert (code, out.endswith("Nothing was written.\n"), card.exists()) == (0, True, False)
    monkeypatch.setenv(launch_config.VARIABLE, "off")
    assert dcpp("tune", "--dry-run")[0] == 0


def test_a_second_tuning_starts_from_the_first(dcpp: Dcpp, card: Path) -> None:
    launch_config.write(card, replace(OTHER, gates=LONG), HERE)
    assert "as before" in dcpp("tune")[1]
    assert launch_config.read(card, HERE) == replace(OTHER, gates=LONG)


def test_what_the_time_did_not_suffice_for_stays(dcpp: Dcpp, card: Path) -> None:
    launch_config.write(card, OTHER, HERE)
    assert dcpp("tune", "--time-limit", "0s")[0] == 1
    assert launch_config.read(card, HERE) == OTHER


def test_a_damaged_file_is_told_and_written_anew(dcpp: Dcpp, card: Path) -> None:
    card.parent.mkdir(parents=True)
    card.write_text("{")
    code, out, _ = dcpp("tune")  # without a warning that dcpp tune would help
    assert (code, out.startswith(f"{card}: cannot be used, so the defaults are to be beaten: it is not JSON")) == (
        0,
        True,
    )
    assert launch_config.read(card, HERE).gates == LONG


def test_a_file_of_other_kernels_is_replaced(dcpp: Dcpp, card: Path) -> None:
    launch_config.write(card, OTHER, {**HERE, "kernels": "89abcdef"})
    code, out, _ = dcpp("tune")
    assert (code, "it was made for other kernels than these." in out) == (0, True)
    assert [path.name for path in card.parent.iterdir()] == [card.name]
    assert launch_config.read(card, HERE) == replace(DEFAULTS, gates=LONG)


def test_what_was_found_can_be_forgotten(dcpp: Dcpp, card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dcpp("tune", "--forget") == (0, f"There is none to remove: {card}\n", "")
    launch_config.write(card, OTHER, HERE)
    assert dcpp("tune", "--forget") == (0, f"Removed: {card}\n", "")
    assert not card.exists()
    card.write_text("{")
    assert dcpp("tune", "--forget") == (0, f"Removed: {card}\n", "")
    card.mkdir()
    code, _, err = dcpp("tune", "--forget")
    assert (code, err.startswith(f"Error: {card}: cannot be removed")) == (1, True)


def test_a_dry_run_forgets_nothing(dcpp: Dcpp, card: Path) -> None:
    launch_config.write(card, OTHER, HERE)
    code, out, err = dcpp("tune", "--forget", "--dry-run")
    assert (code, out) == (1, "")
    assert err == "Error: --forget removes a file, and --dry-run writes nothing. Use only one of them.\n"
    assert launch_config.read(card, HERE) == OTHER


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("text", ["my notes", "[1, 2]", '{"name": "value"}', "", None])
@pytest.mark.parametrize("arguments", [(), ("--forget",)])
def test_a_file_that_is_not_ours_is_left_alone(
    text: str | None, arguments: tuple[str, ...], dcpp: Dcpp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes.txt"
    if text is None:
        notes.mkdir()
    else:
        notes.write_text(text)
    monkeypatch.setenv(launch_config.VARIABLE, str(notes))
    monkeypatch.setattr(tuning, "tune", lambda *_, **__: pytest.fail("was measured"))
    code, out, err = dcpp("tune", *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"Error: {notes}: is not a file of launches, and dcpp tune neither replaces nor removes it.")
    assert "DCPP_LAUNCHES" in err
    assert notes.is_dir() if text is None else notes.read_text() == text


@pytest.mark.usefixtures("card")
def test_a_file_of_ours_may_have_any_name(dcpp: Dcpp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "folder" / "mine.json"
    monkeypatch.setenv(launch_config.VARIABLE, str(mine))
    for _ in range(2):
        code, out, _ = dcpp("tune")
        assert (code, out.endswith(f"Written: {mine}\n"), "cannot be used" in out) == (0, True, False)
    mine.write_text('{"launches": "damaged"}')
    assert dcpp("tune")[0] == 0
    assert launch_config.read(mine, HERE).gates == LONG
    assert dcpp("tune", "--forget") == (0, f"Removed: {mine}\n", "")


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("arguments", [(), ("--forget",), ("--dry-run",)])
def test_a_path_that_is_none_is_an_error(
    arguments: tuple[str, ...], dcpp: Dcpp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(launch_config.VARIABLE, "~nosuchuser/launches.json")
    code, _, err = dcpp("tune", *arguments)
    assert code == 1
    assert err.startswith("Error: DCPP_LAUNCHES is '~nosuchuser/launches.json', which is not a path here (")
    assert err.endswith("Name a file with DCPP_LAUNCHES.\n")


@pytest.mark.usefixtures("card")
def test_a_user_without_a_home_is_told_to_name_a_file(dcpp: Dcpp, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    code, _, err = dcpp("tune")
    assert code == 1
    assert err.startswith("Error: there is no cache folder (Could not determine home directory.).")
    assert err.endswith("Name a file with DCPP_LAUNCHES.\n")


@pytest.mark.usefixtures("card")
def test_no_file_is_written_where_none_is_read(dcpp: Dcpp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch_config.VARIABLE, "off")
    for arguments, use in (((), "Unset it, or use --dry-run."), (("--forget",), "Unset it.")):
        code, _, err = dcpp("tune", *arguments)
        assert (code, err) == (1, f"Error: DCPP_LAUNCHES is 'off': no file is read or written. {use}\n")


def test_a_file_that_cannot_be_written_is_an_error_before_anything_is_measured(
    dcpp: Dcpp, card: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "tune", lambda *_, **__: pytest.fail("was measured"))
    card.mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for named in ("", str(tmp_path / "file" / "launches.json")):
        monkeypatch.setenv(launch_config.VARIABLE, named)
        code, out, err = dcpp("tune")
        assert (code, out, "cannot be written" in err, "DCPP_LAUNCHES" in err) == (1, "", True, True)


def test_a_file_that_cannot_be_written_any_more_is_an_error(
    dcpp: Dcpp, card: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        assert list(card.parent.iterdir()) == []  # the trial left nothing behind
        raise OSError("No space left on device")

    monkeypatch.setattr(launch_config, "write", full)
    code, _, err = dcpp("tune")
    assert (
        code,
        err.endswith(f"{card}: cannot be written (No space left on device). Name another with DCPP_LAUNCHES.\n"),
    ) == (1, True)


def test_a_cpu_has_nothing_to_tune(dcpp: Dcpp) -> None:
    code, out, err = dcpp("tune", "--device", "cpu")
    assert (code, out) == (1, "")
    assert err.startswith("Error: dcpp tune measures on a CUDA device")
    assert dcpp("tune", "--time-limit", "soon")[2].startswith("Error: time-limit must look like")


@pytest.mark.usefixtures("card")
def test_without_triton_or_bf16_there_is_nothing_to_tune(dcpp: Dcpp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "tensor_cores", lambda device: False)
    assert "There is nothing to tune." in dcpp("tune")[2]
    monkeypatch.setattr(support, "has_triton", lambda: False)
    code, _, err = dcpp("tune")
    assert (code, err.strip()) == (1, "Error: dcpp tune needs Triton. Install it with: pip install triton")


# ---------------------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few timings, of few replicas."""
    monkeypatch.setattr(tuning, "ROUNDS", 2)
    monkeypatch.setattr(tuning, "MOST_REPLICAS", 3)


@pytest.mark.gpu
@pytest.mark.usefixtures("short")
def test_a_tuning_on_a_gpu_is_kept_and_right(dcpp: Dcpp) -> None:
    code, out, err = dcpp("tune", "--device", "cuda", "--time-limit", "9m")
    assert code == 0, err
    assert "not reached" not in out
    gpu = torch.device("cuda")
    path = launch_config.file_of(gpu)
    assert path is not None
    assert out.endswith(f"Written: {path}\n")
    launch_config._of_card.cache_clear()  # this process tuned with what was there before
    assert launch_config.of(gpu) == launch_config.read(path, launch_config.card(gpu))
    for kind in layer_cases.COMMON:
        for shape in ((2, 129, 33, 130), (3, 128, 64, 4096), (2, 128, 512, 4096)):
            layer_cases.assert_twin_on_gpu(kind, shape, 1)
    for kind in local_cases.KINDS:
        local_cases.assert_twin_on_gpu(kind, (2, 129, 33, 130))


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_every_candidate_that_runs_on_a_gpu_is_right(group: Group) -> None:
    bench = Bench(group, torch.device("cuda"), 2)
    problems = [bench.problem(one) for one in group.candidates]
    assert problems[0] is None
    assert WRONG not in problems
    for candidate in (one for one, problem in zip(group.candidates, problems, strict=True) if problem is None):
        with launch_config.using(replace(DEFAULTS, **{group.name: candidate})):
            for work in group.work:
                shape = (2, 129, 33 if work.units <= layer.FEW_UNITS else 80, 130)
                if "local" in work.kind:
                    kind = "learned" if "learned" in work.kind else "sparse"
                    local_cases.assert_twin_on_gpu(kind, shape)
                else:
                    layer_cases.assert_twin_on_gpu(work.kind, shape, 1)
                    layer_cases.assert_independent_on_gpu(work.kind, 1, (5, 100, *shape[2:]))


@pytest.mark.gpu
@pytest.mark.usefixtures("short")
def test_times_on_a_gpu_are_of_every_launch() -> None:
    for group in (GROUPS[0], GROUPS[4]):
        bench = Bench(group, torch.device("cuda"), 3)
        times = bench.times(group.candidates[:1] * 2)
        assert len(times) == 2
        assert min(times) > 0.0
