"""Judge ensembles of networks that have been trained one by one, from what they predict."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from dropconnectpp.lab import device as devices
from dropconnectpp.lab.config.ensembles import Ensemble
from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.replicas.judging import TEST, entropies, scores
from dropconnectpp.lab.runs.predictions import Images, Logs
from dropconnectpp.lab.runs.runner import Runner, commit, versions
from dropconnectpp.lab.runs.store import Key, Store


def judge_ensembles(protocols: Iterable[Protocol], members: int, replicas: Sequence[int], runner: Runner) -> bool:
    """Store the rows of ensembles whose networks are all trained; return whether there is one for every ensemble."""
    complete = True
    with runner.store() as store:
        for protocol in protocols:
            ensemble = Ensemble(of=protocol, members=members)
            digest = store.add(ensemble)
            done = {row.key.replica for row in store.rows(protocol.digest, "done")}
            wanted = [Key(digest, number) for number in ensemble.complete_in(replicas)]
            ready = set(ensemble.complete_in(sorted(done)))
            finished = store.finished()
            todo = [key for key in wanted if key.replica in ready and key not in finished]
            try:
                for key in store.claim(todo, runner.owner):
                    _judge(ensemble, key, store, runner)
            finally:
                store.release(todo, runner.owner)
            over = [key.replica for key in wanted if key in store.finished()]
            runner.predictions.forget((protocol.digest, r) for number in over for r in ensemble.of_replicas(number))
            complete = complete and len(over) == len(wanted)
    return complete


def missing(protocols: Iterable[Protocol], members: int, replicas: Sequence[int], runner: Runner) -> list[str]:
    """What to say of ensembles that cannot be judged although nothing is left to train."""
    lines = []
    with runner.store(read_only=True) as store:
        for protocol in protocols:
            ensemble = Ensemble(of=protocol, members=members)
            finished = store.finished()
            absent = [n for n in ensemble.complete_in(replicas) if (ensemble.digest, n) not in finished]
            if absent:
                lines.append(
                    f"{ensemble.label}: {len(absent)} cannot be judged, since a member diverged or its predictions are "
                    "no longer kept. To have them, train into another --out."
                )
    return lines


def _judge(ensemble: Ensemble, key: Key, store: Store, runner: Runner) -> None:
    begun = time.monotonic()
    replicas = list(ensemble.of_replicas(key.replica))
    given = [runner.predictions.read((ensemble.of.digest, replica)) for replica in replicas]
    members = [one for one in given if one is not None]
    if len(members) < len(replicas):
        return
    dataset = runner.dataset(ensemble.data)
    results = judged(members, dataset.test.labels, runner.device)
    foreign = ensemble.of.evaluation.foreign
    for one in results:
        one |= {"data": foreign} if one["images"] == "foreign" else {}
    test = next(one for one in results if one["images"] == TEST[0])
    store.finish(
        key,
        runner.owner,
        "done",
        results={"judged": results, "members": replicas} | {name: test[name] for name in ("accuracy", "nll")},
        seconds=time.monotonic() - begun,
        device=devices.describe(runner.device),
        versions=versions(),
        provenance={"data": dataset.name, **asdict(dataset.provenance)},
        commit=commit(),
    )


def judged(members: Sequence[dict[Images, Logs]], labels: Any, device: torch.device) -> list[dict[str, Any]]:
    """`scores` of the averaged probabilities of an ensemble's members, the test set first."""
    target = torch.from_numpy(np.array(labels)).to(device)
    known: torch.Tensor | None = None
    found = []
    for images in sorted(members[0], key=lambda one: one != TEST):
        stacked = torch.stack([torch.from_numpy(one[images]) for one in members]).to(device).double()
        logs = torch.logsumexp(stacked, 0, keepdim=True) - math.log(len(members))
        known = entropies(logs) if known is None else known
        found.append({"prediction": "ensemble", **scores(images, logs, target, known)[0]})
    return found
