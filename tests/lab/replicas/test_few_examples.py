"""Fewer training examples: each network has its own, smaller sets lie in larger ones, methods share them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stack_cases import METHODS, bright, settings, stack_of
from torch import Tensor

from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Protocol, Training
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.config.small_data import SmallData
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.replicas.stack import Stack

BATCH = settings(METHODS["none"]).training.batch_size
FEW = 2 * BATCH + 1


def few(method: Method, examples: int = FEW, holdout: int = 0) -> Protocol:
    protocol = settings(method)
    return replace(protocol, training=replace(protocol.training, examples=examples, holdout=holdout))


def seen(stack: Stack, epochs: int = 3) -> list[set[int]]:
    """Which training examples each replica saw: all of each epoch's order, the last and incomplete batch too."""
    found: list[set[int]] = [set() for _ in stack.units]
    for _ in range(epochs):
        stack.train_epoch()
        for own, order in zip(found, stack.examples.rows[stack.order].tolist(), strict=True):
            own |= set(order)
    return found


def test_each_network_has_examples_of_its_own_the_same_in_every_epoch() -> None:
    one, other = seen(stack_of(*(Unit(few(METHODS["none"]), replica) for replica in (0, 5))))
    assert len(one) == len(other) == FEW
    assert one != other


def test_methods_share_them_and_fewer_are_among_more() -> None:
    units = [Unit(few(METHODS[name]), 5) for name in ("none", "dropconnect", "bbvi")]
    found = seen(stack_of(*units))
    assert found[0] == found[1] == found[2]
    (more,) = seen(stack_of(Unit(few(METHODS["none"], 3 * BATCH), 5)))
    assert found[0] < more


def test_what_is_held_out_is_none_of_them() -> None:
    stack = stack_of(Unit(few(METHODS["none"], holdout=BATCH), 0))
    kept = set(stack.examples.rows.tolist())
    (found,) = seen(stack)
    assert len(found) == FEW
    assert found <= kept


def test_the_kl_counts_them() -> None:
    segment = stack_of(Unit(few(METHODS["straight-through"]), 0)).segments[0]
    assert segment.regulariser.num_data == FEW


def test_a_replica_trained_alone_is_the_same() -> None:
    units = [Unit(few(METHODS["dropconnect"]), replica) for replica in (0, 5)]
    both, alone = stack_of(*units), stack_of(units[1])
    for stack in (both, alone):
        stack.train_epoch()

    def trained(stack: Stack, row: int) -> Tensor:
        return stack.parameters["dense.weight"][row]

    torch.testing.assert_close(trained(both, 1), trained(alone, 0))


def test_all_of_them_is_the_protocol_itself() -> None:
    protocol = settings(METHODS["none"])
    assert few(METHODS["none"], 0).digest == protocol.digest
    one, whole = SmallData(examples=(FEW, 0), least_steps=401).protocols(protocol)
    assert whole == protocol
    assert one.training.epochs == 201  # two steps each
    assert one.evaluation.every == 51


def test_numbers_that_do_not_fit_are_errors() -> None:
    count = len(bright().train)
    with pytest.raises(ProtocolError, match=f"examples is {count + 1} and there are only {count} training examples"):
        stack_of(Unit(few(METHODS["none"], count + 1), 0))
    with pytest.raises(ProtocolError, match="or at least a batch of 128, got 100"):
        Training(examples=100)
    with pytest.raises(ProtocolError, match="names a number twice"):
        SmallData(examples=(500, 500))
    with pytest.raises(ProtocolError, match="must be 0 for all, or at least a batch of 128, got 3"):
        SmallData(examples=(3,)).protocols(Protocol())
