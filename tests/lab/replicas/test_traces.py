"""Twenty steps of every method on fixed data, against the losses, parameters and results recorded before.

The same seeds must go on giving the same numbers. On the machine that wrote them the traces agree to the last bit;
processors of another make add up in another order, hence the tolerance, which is some thousand roundings wide. Small
steps keep the keep probabilities of some methods away from 0 and 1, where a rounding would grow beyond that.
Write them anew, after a change that is meant, with: python tests/lab/replicas/test_traces.py
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Architecture, Evaluation, Protocol, Training
from dropconnectpp.lab.data.dataset import Dataset, Provenance, Split
from dropconnectpp.lab.replicas import evaluation
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.replicas.stack import Stack

GOLDEN = Path(__file__).parent / "golden" / "traces.json"
TOLERANCE = 1e-12
EPOCHS, BATCHES, REPLICAS = 4, 5, (0, 3)

ESTIMATORS: dict[str, dict[str, Any]] = {
    "bbvi": {"baseline": "running"},
    "bbvi mean-network": {"baseline": "mean-network"},
    "bbvi leave-one-out": {"baseline": "leave-one-out"},
    "eq16": {"estimator": "eq16"},
    "eq16 same-sample": {"estimator": "eq16", "baseline": "same-sample"},
    "straight-through": {"estimator": "straight-through"},
    "local": {"estimator": "local"},
    "concrete": {"estimator": "concrete"},
    "disarm": {"estimator": "disarm"},
}


def crossed() -> dict[str, Method]:
    """Each estimator with each way of having q(pi), by logit with one sample and with two, and by probability."""
    found = {}
    for name, hyper in itertools.product(ESTIMATORS, ("learned", "optimal")):
        for kind, samples, step in (("logit", 1, 1.0), ("logit", 2, 1.0), ("probability", 2, 0.1)):
            impossible = (name.startswith("eq16") and hyper == "optimal") or (name.endswith("one-out") and samples == 1)
            if not impossible:
                options = {"hyper": hyper, "parameterisation": kind, "num_samples": samples, "logit_step": step}
                found[f"{name}, {hyper}, {kind}, L = {samples}"] = Method(**options, **ESTIMATORS[name])
    return found


SPARSE: dict[str, Any] = {"estimator": "straight-through", "hyper": "optimal", "alpha": 10.0, "beta": 90.0}
OTHERS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "dropout": {"kind": "dropout", "rate": 0.4},
    "dropconnect": {"kind": "dropconnect", "rate": 0.3},
    "dropconnect, gaussian": {"kind": "dropconnect", "rate": 0.3, "evaluation": "gaussian"},
    "dropconnect, L = 2": {"kind": "dropconnect", "rate": 0.6, "num_samples": 2},
    "dropconnect, slab": {"kind": "dropconnect", "rate": 0.3, "slab": 0.1},
    "preset paper": {},
    "preset sparse": {**SPARSE, "logit_step": 100.0},
    "preset per-example": {**SPARSE, "estimator": "local", "kl_weight": 4.0, "logit_step": 100.0},
    "decay": {"decay": 0.5, "logit_step": 30.0},
    "temperature": {"estimator": "concrete", "temperature": 0.3, "logit_step": 30.0},
    "prior, learned": {"alpha": 2.0, "beta": 0.7, "kl_weight": 30.0},
    "prior, optimal": {"alpha": 0.6, "beta": 3.0, "hyper": "optimal", "kl_weight": 30.0},
    "keep probability": {"keep_probability": 0.8},
    "own posterior": {"posterior_alpha": 1.2, "posterior_beta": 2.5, "alpha": 2.0},
    "no KL": {"kl_weight": 0.0, "hyper": "optimal"},
    "random sign": {"reward": "random-sign", "logit_step": 30.0},
    "random sign, optimal": {"reward": "random-sign", "hyper": "optimal", "logit_step": 30.0},
    "random sign, disarm": {"reward": "random-sign", "estimator": "disarm", "logit_step": 30.0},
    "warm-up": {"kl_warmup": 2, "kl_weight": 30.0, "hyper": "optimal"},
    "late": {"learn_after": 1, "logit_step": 30.0},
    "frozen": {"freeze_after": 2, "logit_step": 30.0, "hyper": "optimal"},
    "late and frozen": {"learn_after": 1, "freeze_after": 3, "kl_warmup": 2, "logit_step": 30.0},
    "slab": {"slab": 0.1, "logit_step": 30.0},
    "slab, straight-through": {"slab": 0.1, "estimator": "straight-through", "hyper": "optimal", "logit_step": 30.0},
    "slab, local": {"slab": 0.1, "estimator": "local", "hyper": "optimal", "logit_step": 30.0},
    "slab, concrete": {"slab": 0.1, "estimator": "concrete", "parameterisation": "probability"},
}
METHODS = {**{name: Method(**options) for name, options in OTHERS.items()}, **crossed()}


def fixed_images(name: str, count: int) -> Split:
    """Images from a hash, whose numbers no library can change, with the class in their brightness."""
    labels = np.arange(count) % 3
    stream = hashlib.shake_256(name.encode()).digest(count * 2 * 8 * 8)
    images = np.frombuffer(stream, dtype=np.uint8).reshape(count, 2, 8, 8) // 2
    images[:, 0, :4] += (labels * 40).astype(np.uint8)[:, None, None]
    return Split(images, labels)


def fixed_data() -> Dataset:
    batch = 4
    train, test = fixed_images("train", BATCHES * batch), fixed_images("test", 9)
    return Dataset("fixed", train, test, ("a", "b", "c"), "", "", Provenance("a hash", verified=True))


def protocol(method: Method, precision: str = "float64") -> Protocol:
    return Protocol(
        data="fixed",
        method=method,
        architecture=Architecture(maps=(2, 3), pooled=(True, False), filter_size=3, padding=1, hidden=4),
        training=Training(step_size=0.05, batch_size=4, epochs=EPOCHS),
        evaluation=Evaluation(samples=(1, 3), shares=(0.5,), bins=3, predictive_samples=3, curve_samples=2),
        root_seed=5,
        precision=precision,  # type: ignore[arg-type]
    )


def checksum(value: Tensor) -> list[float]:
    """Two sums that no two tensors are likely to share, of terms that cannot cancel."""
    numbers = value.detach().double().flatten().tolist()
    size = math.fsum(map(abs, numbers))
    return [size, math.fsum((place % 7 + 1) * abs(number + 1.0) for place, number in enumerate(numbers))]


def short(value: Any) -> Any:
    """Results with each long list as its sum."""
    if isinstance(value, dict):
        return {name: short(one) for name, one in value.items()}
    if isinstance(value, list):
        return math.fsum(value) if len(value) > 9 else [short(one) for one in value]
    return value


def trained(method: Method, precision: str = "float64") -> tuple[Stack, list[list[float]]]:
    """The stack after its twenty steps, and of each step the sum of the epoch's losses so far, for each replica."""
    one = protocol(method, precision)
    stack, losses = Stack([Unit(one, replica) for replica in REPLICAS], fixed_data(), torch.device("cpu")), []
    stack.on_batch = lambda share: losses.append(stack.loss_sum.tolist())
    for _ in range(EPOCHS):
        stack.train_epoch()
    return stack, losses


def trace(name: str) -> dict[str, Any]:
    stack, losses = trained(METHODS[name])
    state = stack.state()
    sums = {f"{key}, sum of squares": value for key, value in state["sums"].items()}
    moments = {f"moments {number}": value for number, value in enumerate(state["moments"]) if value is not None}
    settings = stack.protocol.evaluation
    return {
        "losses": losses,
        "tensors": {key: checksum(value) for key, value in {**state["tensors"], **sums, **moments}.items()},
        "curve": evaluation.along_the_way(stack, settings),
        "results": [short(one) for one in evaluation.final(stack, settings)],
    }


def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.read_text())
    return found


def assert_same(found: Any, expected: Any, where: str) -> None:
    """Plain data with the same names, whose numbers agree."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same(found[name], value, f"{where}, {name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}, {number}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE, nan_ok=True), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_as_it_always_did(name):
    assert_same(json.loads(json.dumps(trace(name))), golden()[name], name)


def test_each_recorded_trace_is_followed_and_each_has_twenty_steps():
    recorded = golden()
    assert recorded.keys() == METHODS.keys()
    assert {len(one["losses"]) for one in recorded.values()} == {20}


def test_a_trace_tells_methods_apart():
    recorded = golden()
    assert len({json.dumps(one) for one in recorded.values()}) == len(set(METHODS.values()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    lines = (f"{json.dumps(name)}: {json.dumps(trace(name), sort_keys=True)}" for name in METHODS)
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
