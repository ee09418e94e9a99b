"""`dcpp status`: who works on what while a run goes on, who is gone, and what failed."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from cli_cases import notes

from dropconnectpp.lab.cli import status as command
from dropconnectpp.lab.config.protocol import paper
from dropconnectpp.lab.runs import status as states
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.status import RunStatus, Work
from dropconnectpp.lab.runs.store import Store

OUT = Path("dcpp-results")


@pytest.fixture
def owner(dcpp) -> Owner:
    """Who has one of three networks in work; another has failed."""
    OUT.mkdir()
    me = Owner.here()
    with Store.open(OUT / "results.sqlite") as store:
        digest = store.add(paper("cifar10", "dropout"))
        for key in store.claim([(digest, replica) for replica in range(3)], me, limit=2):
            if key.replica:
                store.finish(key, me, "failed", results={"reason": "broken \x1b[31m"}, seconds=0.0, device="")
    return me


def running(owner: Owner, **changes: object) -> RunStatus:
    now = time.time()
    work = Work(
        worker="worker 1",
        host="node7",
        pid=4711,
        device="cuda:1",
        title="cifar10: Dropout",
        replicas=1,
        epochs=100,
        done=12.5,
        figures="loss 1.234",
        since=now - 30,
    )
    status = RunStatus(
        owner=owner.name,
        engine="host",
        workers=2,
        total=3,
        finished=0,
        share=0.04,
        left_s=9000.0,
        deaths=1,
        started=now - 60,
        updated=now,
        work=(work,),
    )
    return replace(status, **changes)


def test_who_works_on_what_is_shown_here_and_on_the_page(dcpp, owner):
    states.write(states.path_of(OUT, owner), running(owner))
    code, out, _ = dcpp("status")
    assert code == 0
    assert f"The run of {owner}: 3 networks, 0 finished, 1 in work, 2 waiting; 4% of the work done" in out
    assert "about 2 h 30 min left. 1 worker died." in out
    assert "worker 1  process 4711 on node7, cuda:1  cifar10: Dropout         1  12.5 of 100  loss 1.234" in out
    assert "broken \\x1b[31m" in out
    dcpp("report")
    page = (OUT / "index.html").read_text()
    for text in ("process 4711 on node7, cuda:1", "12.5 of 100", "The same command tries them again."):
        assert text in page


def test_a_run_that_is_gone_is_told_and_forgotten_by_the_next(dcpp, owner):
    dead = replace(owner, pid=2**22 + 1)
    states.write(states.path_of(OUT, dead), running(dead))
    assert "is gone, 0 s ago, without a word. The same command goes on" in dcpp("status")[1]
    (OUT / "status" / "other.json").write_text('{"owner": 3}')  # of another program
    assert len(states.read(OUT)) == 1
    states.forget_gone(OUT)
    assert states.read(OUT) == []
    assert f"{owner} holds 1 networks and says nothing of them." in dcpp("status")[1]


def test_without_a_run_it_says_what_there_is(dcpp):
    code, _, err = dcpp("status")
    assert code == 1
    assert "results.sqlite" in err
    dcpp("run", "mine.toml", "--repeats", "1")
    assert dcpp("status")[1].strip() == "No run is going on here. Networks: 3 done."
    assert "Runs</h2>" not in (OUT / "index.html").read_text()
    assert notes("command")


def test_it_is_followed_until_no_run_is_left(dcpp, owner, monkeypatch):
    states.write(states.path_of(OUT, owner), running(owner))
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        states.remove(states.path_of(OUT, owner))
        with Store.open(OUT / "results.sqlite") as store:
            store.free(store.holders())

    monkeypatch.setattr(command.time, "sleep", nap)
    code, out, _ = dcpp("status", "--watch")
    assert code == 0
    assert naps == [command.EVERY_S]
    assert "No run is going on here. Networks: 1 failed." in out
