"""Running work into a store: resumed, taken over, stopped, out of memory, and killed with -9 at random moments."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_cases import Diary
from tiny_cases import EVALUATION, TINY, TWO_LAYERS, tiny

from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Architecture
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.data.dataset import DataError
from dropconnectpp.lab.data.verification import Verification
from dropconnectpp.lab.replicas import evaluation
from dropconnectpp.lab.replicas.network import Shape, Unit
from dropconnectpp.lab.replicas.stack import Stack
from dropconnectpp.lab.report import text
from dropconnectpp.lab.runs import runner as module
from dropconnectpp.lab.runs import session
from dropconnectpp.lab.runs.checkpoints import Checkpoint, CheckpointError, Checkpoints
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.progress import Display, History
from dropconnectpp.lab.runs.runner import Runner
from dropconnectpp.lab.runs.session import ClaimsLostError, Heartbeat
from dropconnectpp.lab.runs.stack_sizes import bytes_per_replica
from dropconnectpp.lab.runs.store import Store

CPU = torch.device("cpu")
LONGER = replace(TINY, architecture=TWO_LAYERS, training=replace(TINY.training, epochs=4), evaluation=EVALUATION)
METHODS = (Method(kind="none"), Method(kind="dropconnect", rate=0.5), Method())


def units(replicas: int = 2, **training: Any) -> list[Unit]:
    base = replace(LONGER, training=replace(LONGER.training, **training))
    return [Unit(replace(base, method=method), replica) for method in METHODS for replica in range(replicas)]


def make(out: Path, **options: Any) -> Runner:
    return Runner(out, CPU, tiny, Diary(), **options)


def diary(runner: Runner) -> Diary:
    assert isinstance(runner.display, Diary)
    return runner.display


def table(out: Path) -> list[tuple[Any, ...]]:
    """Everything a report uses of the rows: all but times."""
    with Store.open(out / "results.sqlite", read_only=True) as store:
        return [(*row.key, row.status, json.dumps(row.results, sort_keys=True)) for row in store.rows()]


def test_every_unit_becomes_a_finished_row(tmp_path):
    runner = make(tmp_path)
    assert runner.run(units()) == module.Outcome(finished=6, left=0, stopped=False)
    with runner.store(read_only=True) as store:
        rows = store.rows()
    assert [row.status for row in rows] == ["done"] * 6
    row = rows[0]
    assert len(row.results["losses"]) == 4
    assert [point["epoch"] for point in row.results["curve"]] == [2, 4]
    assert row.results["accuracy"] == row.results["curve"][-1]["accuracy"]
    assert row.provenance["verified"] is False
    assert row.versions["torch"] == torch.__version__
    assert not list((tmp_path / "checkpoints").glob("*")) if (tmp_path / "checkpoints").exists() else True
    assert diary(runner).groups == [(6, 0)]


def test_versions_have_that_of_triton_where_it_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="9.9"))
    assert module.versions()["triton"] == "9.9"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert module.versions().keys() >= {"python", "torch", "dropconnectpp"}
    assert "triton" not in module.versions()


def test_what_is_finished_is_not_trained_again(tmp_path):
    make(tmp_path).run(units())
    again = make(tmp_path)
    assert again.run(units(3)).finished == 9
    assert diary(again).groups == [(3, 0)]


def test_rows_do_not_depend_on_how_work_is_cut_into_stacks(tmp_path):
    make(tmp_path / "one", group=6).run(units())
    make(tmp_path / "two", group=1).run(units())
    assert table(tmp_path / "one") == table(tmp_path / "two")


def test_protocols_that_cannot_share_a_stack_get_their_own(tmp_path):
    other = [Unit(replace(unit.protocol, root_seed=1), unit.replica) for unit in units(1)]
    runner = make(tmp_path)
    assert runner.run([*units(1), *other]).finished == 6
    assert diary(runner).groups == [(3, 0), (3, 0)]


def test_work_of_a_living_process_is_left_to_it(tmp_path):
    todo = units(1)
    with Store.open(tmp_path / "results.sqlite") as store:
        for unit in todo:
            store.add(unit.protocol)
        store.claim([todo[0].key], Owner.here())
        runner = make(tmp_path)
        assert runner.run(todo) == module.Outcome(finished=2, left=1, stopped=False)


def test_an_error_gives_the_work_back(tmp_path, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "final", fail)
        with pytest.raises(RuntimeError, match="broken"):
            make(tmp_path).run(units(1))
    assert table(tmp_path) == []
    assert make(tmp_path).run(units(1)).finished == 3


def test_a_replica_that_diverges_is_a_row_that_says_so(tmp_path):
    good, bad = units(1)[0], units(1, step_size=1e30)[0]
    assert make(tmp_path).run([good, bad]).finished == 2
    with Store.open(tmp_path / "results.sqlite", read_only=True) as store:
        found = {row.key.digest: row for row in store.rows()}
    assert found[good.key[0]].status == "done"
    diverged = found[bad.key[0]]
    assert diverged.status == "diverged"
    assert diverged.results["diverged_at"] >= 1
    assert "accuracy" not in diverged.results


def test_a_stack_that_diverged_whole_stops_early(tmp_path):
    runner = make(tmp_path)
    runner.run(units(1, step_size=1e30, epochs=50)[:1])
    assert len(diary(runner).epochs) < 50


def test_a_row_that_diverged_does_not_depend_on_its_neighbours(tmp_path):
    good, bad = units(1)[0], units(1, step_size=1e30)[0]
    make(tmp_path / "pair").run([good, bad])
    make(tmp_path / "alone").run([bad])
    assert table(tmp_path / "alone")[0] in table(tmp_path / "pair")


def test_a_network_spoilt_by_its_last_step_has_diverged():
    history = History([[1.0, 0.5]], [[{"epoch": 1, "accuracy": 50.0}, {"epoch": 2, "accuracy": 10.0}]])
    assert history.result(0, {"nll": 0.4})[0] == "done"
    status, results = history.result(0, {"nll": float("nan")})
    assert (status, results["diverged_at"]) == ("diverged", 2)
    assert results["curve"] == [{"epoch": 1, "accuracy": 50.0}]
    assert history.result(0, {"nll": 323_360.0, "accuracy": 10.0}) == (status, results)
    assert history.result(0, {"nll": 49.9})[0] == "done"


def test_a_row_that_was_stored_as_done_before_there_was_a_limit_is_counted(tmp_path):
    runner = make(tmp_path)
    with runner.store() as store:
        unit = units(1)[0]
        store.add(unit.protocol)
        for replica, nll in enumerate((323_360.0, math.nan, 2.3)):
            (key,) = store.claim([(unit.key[0], replica)], runner.owner)
            results = {"nll": nll, "accuracy": 10.0, "losses": [2.3]}
            store.finish(key, runner.owner, "done", results=results, seconds=1.0, device="cpu")
        assert store.content().diverged_as_done == 2
    shown = text(tmp_path / "results.sqlite")
    assert "2 of 3 finished networks have an NLL of 50 nats or more: by today's rule they diverged." in shown


def test_what_was_trained_on_damaged_images_is_not_kept(tmp_path):
    def damaged() -> None:
        raise DataError("tiny: has changed.")

    def load(name: str) -> Any:
        return replace(tiny(), verification=Verification(damaged))

    with pytest.raises(DataError, match=r"tiny: has changed\."):
        Runner(tmp_path, CPU, load, checkpoint_s=math.inf).run(units(1))
    with pytest.raises(DataError, match=r"tiny: has changed\."):
        Runner(tmp_path, CPU, load, checkpoint_s=0.0).run(units(1))
    assert table(tmp_path) == []
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_the_time_limit_stops_within_an_epoch(tmp_path, monkeypatch):
    real = session.Session._after_batch

    def late(self: session.Session, share: float) -> None:
        self.deadline = time.monotonic() - 1.0
        real(self, share)

    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "_after_batch", late)
        assert make(tmp_path / "cut").run(units(1)).stopped
    (path,) = (tmp_path / "cut" / "checkpoints").glob("*.pt")
    state = Checkpoints(path.parent).read(path).state
    assert (state["epoch"], state["batch"]) == (0, 1)
    assert not make(tmp_path / "cut").run(units(1)).left
    make(tmp_path / "whole").run(units(1))
    assert table(tmp_path / "cut") == table(tmp_path / "whole")


def test_other_images_under_the_same_name_are_refused(tmp_path):
    def with_content(content: str) -> Any:
        made = tiny()
        return lambda name: replace(made, provenance=replace(made.provenance, content=content))

    Runner(tmp_path, CPU, with_content("first")).run(units(1))
    Runner(tmp_path, CPU, with_content("first")).run(units(2))
    with pytest.raises(ProtocolError, match=r"tiny holds other images .*content second, then first.*another --out"):
        Runner(tmp_path, CPU, with_content("second")).run(units(3))


def test_a_checkpoint_of_other_images_is_not_gone_on_with(tmp_path, monkeypatch):
    made = tiny()

    def load(content: str) -> Any:
        return lambda name: replace(made, provenance=replace(made.provenance, content=content))

    with out_of_time(monkeypatch, epoch=1):
        Runner(tmp_path, CPU, load("first")).run(units(1))
    assert len(list((tmp_path / "checkpoints").glob("*.pt"))) == 1
    runner = Runner(tmp_path, CPU, load("second"), Diary())
    assert not runner.run(units(1)).left
    assert diary(runner).groups == [(3, 0)]


def test_a_heartbeat_notices_that_the_work_was_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "HEARTBEAT_S", 0.01)
    todo = units(1)
    owner = Owner.here()
    with Store.open(tmp_path / "results.sqlite") as store:
        for unit in todo:
            store.add(unit.protocol)
        store.claim([unit.key for unit in todo], owner)
        with Heartbeat(store.path, owner, [unit.key for unit in todo]) as heartbeat:
            time.sleep(0.1)
            heartbeat.check()
            store.release([todo[0].key], owner)
            deadline = time.monotonic() + 30
            while not heartbeat.lost:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with pytest.raises(ClaimsLostError):
                heartbeat.check()


def test_work_that_was_taken_over_is_left_to_the_other(tmp_path, monkeypatch):
    seen = []

    def lost_once(self: Heartbeat) -> None:
        seen.append(1)
        if len(seen) == 1:
            raise ClaimsLostError

    monkeypatch.setattr(Heartbeat, "check", lost_once)
    runner = make(tmp_path)
    assert not runner.run(units(1)).left
    assert len(seen) > 1
    assert diary(runner).notes == ["Another process has taken this work over; going on with what is left."]


# -------------------------------------------------------------------------------------- time and memory


@contextmanager
def out_of_time(monkeypatch: pytest.MonkeyPatch, epoch: int) -> Iterator[None]:
    """As if the time limit were over once so many epochs are."""
    real = session.Session._require

    def late(self: session.Session, needed_s: float, **how: bool) -> None:
        if self.stack.epoch == epoch:
            self.deadline = time.monotonic() - 1.0
        real(self, needed_s, **how)

    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "_require", late)
        yield


@pytest.mark.parametrize("epoch", [1, 3, 4])
def test_a_time_limit_keeps_everything_and_the_same_work_goes_on(tmp_path, monkeypatch, epoch):
    make(tmp_path / "whole").run(units())
    with out_of_time(monkeypatch, epoch):
        stopped = make(tmp_path / "cut")
        assert stopped.run(units()) == module.Outcome(finished=0, left=6, stopped=True)
    assert diary(stopped).notes == ["The time limit is near: stopped. The same command goes on from here."]
    assert len(list((tmp_path / "cut" / "checkpoints").glob("*.pt"))) == 1
    again = make(tmp_path / "cut")
    assert not again.run(units()).left
    assert diary(again).groups == [(6, epoch)]
    assert table(tmp_path / "cut") == table(tmp_path / "whole")


def test_a_limit_too_short_for_anything_writes_nothing_and_says_what_it_takes(tmp_path, monkeypatch):
    stopped = make(tmp_path, deadline=time.monotonic() - 1.0)
    assert stopped.run(units()) == module.Outcome(finished=0, left=6, stopped=True)
    assert not list((tmp_path / "checkpoints").glob("*"))
    assert diary(stopped).notes == ["The time limit is near: stopped. The same command goes on from here."]
    with out_of_time(monkeypatch, 2):
        make(tmp_path).run(units())
    (checkpoint,) = (tmp_path / "checkpoints").glob("*.pt")
    before = checkpoint.stat().st_mtime_ns
    monkeypatch.setattr(session, "SAVING_BYTES_S", 1.0)
    again = make(tmp_path, deadline=time.monotonic() + 600.0)
    assert again.run(units()).stopped
    assert checkpoint.stat().st_mtime_ns == before
    assert re.search(r"takes about [\d]{4,} s without", diary(again).notes[1])


def test_a_limit_leaves_time_to_write_the_checkpoint(tmp_path, monkeypatch):
    real, clock = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + clock[0])
    write = Checkpoints.write

    def slow(self: Checkpoints, checkpoint: Checkpoint) -> None:
        clock[0] += 100.0
        write(self, checkpoint)

    train = Stack.train_epoch

    def epoch(stack: Stack) -> torch.Tensor:
        clock[0] += 10.0
        return train(stack)

    monkeypatch.setattr(Checkpoints, "write", slow)
    monkeypatch.setattr(Stack, "train_epoch", epoch)
    monkeypatch.setattr(session, "SAVING_BYTES_S", 1e12)  # the first one takes it by surprise
    deadline = time.monotonic() + 250.0
    runner = make(tmp_path, deadline=deadline, checkpoint_s=5.0)
    assert runner.run(units(1)).stopped
    assert diary(runner).epochs == [1, 2, 3]  # 10, its checkpoint's 100, 10, 10; a fourth and a checkpoint are too long
    assert time.monotonic() < deadline


def test_out_of_memory_means_a_smaller_stack_and_a_line_that_says_so(tmp_path, monkeypatch):
    real = Stack.train_epoch

    def small_device(stack: Stack) -> torch.Tensor:
        if len(stack.units) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return real(stack)

    monkeypatch.setattr(Stack, "train_epoch", small_device)
    runner = make(tmp_path)
    assert not runner.run(units()).left
    assert [replicas for replicas, _ in diary(runner).groups] == [6, 3, 1, 1, 1, 1, 1, 1]
    assert diary(runner).notes[0] == "6 replicas do not fit the device's memory: going on with 3 at once."


def test_an_evaluation_that_does_not_fit_takes_fewer_images_and_loses_nothing(tmp_path, monkeypatch):
    make(tmp_path / "whole").run(units(1))
    real = evaluation.final

    def small_device(stack: Stack, *arguments: Any) -> Any:
        if (stack.chunk or evaluation.CHUNK) > 300:
            raise torch.OutOfMemoryError("out of memory")
        return real(stack, *arguments)

    monkeypatch.setattr(evaluation, "final", small_device)
    runner = make(tmp_path / "small")
    assert not runner.run(units(1)).left
    assert diary(runner).epochs == [1, 2, 3, 4]
    assert diary(runner).notes == [
        f"Evaluating {size} images at a time: more do not fit the device's memory." for size in (1000, 500, 250)
    ]
    assert table(tmp_path / "small") == table(tmp_path / "whole")


def test_a_checkpoint_that_does_not_fit_now_is_kept(tmp_path, monkeypatch):
    with out_of_time(monkeypatch, epoch=1):
        make(tmp_path).run(units(1))

    def too_small(stack: Stack) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Stack, "train_epoch", too_small)
        with pytest.raises(ProtocolError, match=r"3 replicas do not fit .* now .* Their checkpoint is kept"):
            make(tmp_path).run(units(1))
    assert len(list((tmp_path / "checkpoints").glob("*.pt"))) == 1
    assert not make(tmp_path).run(units(1)).left


def test_one_replica_that_does_not_fit_is_an_error(tmp_path, monkeypatch):
    def too_small(stack: Stack) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Stack, "train_epoch", too_small)
    with pytest.raises(ProtocolError, match="one replica does not fit the memory of cpu"):
        make(tmp_path).run(units(1)[:1])


def test_the_guess_at_memory_grows_with_the_network():
    small = bytes_per_replica(Shape(Architecture(), 3, 32, 10), 128)
    assert small < bytes_per_replica(Shape(Architecture(hidden=512), 3, 32, 10), 128)
    assert 10**8 < small < 10**10


# --------------------------------------------------------------------------------------- checkpoints


def checkpoint(folder: Path) -> tuple[Checkpoints, Checkpoint]:
    todo = units(1)
    stack = Stack(todo, tiny(), CPU)
    keys = tuple(unit.key for unit in todo)
    return Checkpoints(folder), Checkpoint(keys, stack.state(), [[], [], []], [[], [], []], 1.5)


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    checkpoints, made = checkpoint(tmp_path)
    checkpoints.write(made)
    ((path, keys),) = checkpoints.all()
    assert (path, keys) == (checkpoints.path(made.keys), made.keys)
    found = checkpoints.read(path)
    assert found is not None
    assert (found.keys, found.losses, found.seconds) == (made.keys, made.losses, made.seconds)
    for name, value in made.state["tensors"].items():
        assert torch.equal(found.state["tensors"][name], value)


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    checkpoints, made = checkpoint(tmp_path / "checkpoints")
    checkpoints.write(made)
    path = checkpoints.path(made.keys)
    path.write_bytes(path.read_bytes()[:500])
    runner = make(tmp_path)
    assert not runner.run(units(1)).left
    assert any("damaged" in note and str(path) in note for note in diary(runner).notes)


def test_a_checkpoint_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"keys": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Checkpoints(tmp_path).read(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    checkpoints, made = checkpoint(tmp_path)
    checkpoints.write(made)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*The last checkpoint is as it was"):
        checkpoints.write(made)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".pt"]


def test_what_a_killed_writer_left_is_cleared_after_an_hour(tmp_path):
    checkpoints, made = checkpoint(tmp_path)
    checkpoints.write(made)
    for name, age in (("a.1.new", 0.0), ("b.2.new", 4000.0)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age, time.time() - age))
    list(checkpoints.all())
    assert (tmp_path / "a.1.new").exists()
    assert not (tmp_path / "b.2.new").exists()


def test_a_checkpoint_that_vanishes_while_it_is_looked_for_is_no_error(tmp_path):
    checkpoints, made = checkpoint(tmp_path)
    checkpoints.write(made)
    found = checkpoints.all()
    next(found)
    checkpoints.forget(made.keys)
    assert list(found) == []


def test_a_checkpoint_whose_work_is_finished_is_removed(tmp_path):
    checkpoints, made = checkpoint(tmp_path / "checkpoints")
    make(tmp_path).run(units(1))
    checkpoints.write(made)
    make(tmp_path).run(units(1))
    assert list(checkpoints.all()) == []


def test_a_checkpoint_of_other_work_is_left_alone(tmp_path):
    checkpoints, made = checkpoint(tmp_path / "checkpoints")
    checkpoints.write(made)
    make(tmp_path).run(units(1, epochs=3))
    assert len(list(checkpoints.all())) == 1


@pytest.mark.parametrize(("saving_s", "wanted"), [(0.0, list(range(1, 14))), (0.3, [1, 12])])
def test_checkpoints_that_take_long_are_written_less_often(tmp_path, monkeypatch, saving_s, wanted):
    clock, epochs = [0.0], []

    def saved(self: Checkpoints, made: Checkpoint) -> None:
        clock[0] += saving_s
        epochs.append(made.state["epoch"])

    def trained(self: Stack, train: Any = Stack.train_epoch) -> torch.Tensor:
        clock[0] += 1.0
        return train(self)

    monkeypatch.setattr(session.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(Checkpoints, "write", saved)
    monkeypatch.setattr(Stack, "train_epoch", trained)
    session.Session(units(1, epochs=13), tiny(), CPU, Checkpoints(tmp_path), Display(), None, 0.9).train(lambda: None)
    assert epochs == wanted  # 0.3 s are three per cent of ten seconds


# -------------------------------------------------------------------------------------- kill -9

# The server imports torch once; each child is then a fork of it, alive in milliseconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["dropconnectpp.lab.runs.runner"])


def work(out: Path) -> None:
    torch.set_num_threads(1)
    make(out, group=4, checkpoint_s=0.0).run(units(4, epochs=12))


def start(out: Path) -> Any:
    process = PROCESSES.Process(target=work, args=(out,))
    process.start()
    return process


def test_killed_twenty_times_at_random_moments_it_ends_with_the_same_rows(tmp_path):
    begun = time.monotonic()
    make(tmp_path / "whole", group=4).run(units(4, epochs=12))
    whole = time.monotonic() - begun
    moments = random.Random(1)
    kills = 0
    for _ in range(20):
        process = start(tmp_path / "killed")
        process.join(moments.uniform(0.0, 0.6 * whole))  # by the machine's own speed
        kills += process.is_alive()
        process.kill()
        process.join()
    assert kills >= 5, "the work was over too soon for this to test anything"
    process = start(tmp_path / "killed")
    process.join()
    assert process.exitcode == 0
    assert table(tmp_path / "killed") == table(tmp_path / "whole")
    assert not list((tmp_path / "killed" / "checkpoints").glob("*.pt"))


def test_two_processes_share_the_work_and_one_takes_over_from_the_dead(tmp_path):
    make(tmp_path / "whole", group=4).run(units(4, epochs=12))
    first, second = start(tmp_path / "shared"), start(tmp_path / "shared")
    time.sleep(0.4)
    first.kill()
    first.join()
    second.join()
    assert second.exitcode == 0
    last = start(tmp_path / "shared")  # the dead one's work may have been claimed after the second had looked
    last.join()
    assert table(tmp_path / "shared") == table(tmp_path / "whole")


def test_the_display_hears_of_every_batch(tmp_path):
    class Listener(Diary):
        heard: list[float]

        def within(self, done: float) -> None:
            self.heard.append(done)

    listener = Listener()
    listener.heard = []
    Runner(tmp_path, CPU, tiny, listener).run(units(1, epochs=2))
    assert listener.heard == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
