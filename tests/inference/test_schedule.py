"""The schedule of a sparsity plan: phases, prices and step sizes as plain numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from dropconnectpp.errors import ArgumentError
from dropconnectpp.inference.schedule import (
    BRAKE,
    MET_AT,
    MOST_PRICE_CHANGE,
    START_PRICE,
    SparsitySchedule,
    Steering,
    kl_weight_of_price,
    logit_step_size,
    price_of_kl_weight,
)


def test_phases_begin_and_end_where_they_are_told_to() -> None:
    schedule = SparsitySchedule(10, price=1.0, warmup=0.3, fix_at=0.8)
    assert [schedule.phase(step) for step in range(12)] == ["rise"] * 3 + ["learn"] * 5 + ["fixed"] * 4


def test_the_kl_rises_in_a_straight_line_and_is_gone_once_the_support_is_fixed() -> None:
    schedule = SparsitySchedule(100, price=2.0, warmup=0.4, fix_at=0.9)
    state = schedule.start()
    weights = [schedule.kl_weight_at(state, step, 1.0, 99.0) * math.log(99.0) for step in (0, 10, 20, 40, 89, 90, 100)]
    assert weights == pytest.approx([0.0, 0.5, 1.0, 2.0, 2.0, 0.0, 0.0])
    assert SparsitySchedule(100, price=2.0, warmup=0.0).kl_factor(0) == 1.0


def test_without_an_end_the_support_is_never_fixed() -> None:
    schedule = SparsitySchedule(10, price=1.0, fix_at=1.0)
    assert not schedule.fixed(10**6)
    assert schedule.phase(10**6) == "learn"


def test_step_sizes_of_the_logits_fall_over_the_second_half_and_never_below_zero() -> None:
    schedule = SparsitySchedule(100, price=1.0, logit_lr=0.1, fix_at=1.0)
    found = [schedule.logit_lr_at(step) for step in (0, 50, 75, 100, 101, 1000)]
    assert found == pytest.approx([0.1, 0.1, 0.05, 0.0, 0.0, 0.0])
    assert SparsitySchedule(100, price=1.0, logit_lr=0.1, fix_at=0.6).logit_lr_at(60) == 0.0
    assert SparsitySchedule(400, price=1.0).logit_lr_at(0) == logit_step_size(400) == pytest.approx(0.11)


def test_a_price_is_the_kl_weight_times_the_prior_s_log_odds_and_back() -> None:
    assert price_of_kl_weight(0.3, 1.0, 99.0) == pytest.approx(0.3 * math.log(99.0))
    assert kl_weight_of_price(price_of_kl_weight(0.3, 2.0, 9.0), 2.0, 9.0) == pytest.approx(0.3)
    with pytest.raises(ArgumentError, match=r"beta is above alpha, got alpha=2\.0 and beta=1\.0"):
        price_of_kl_weight(1.0, 2.0, 1.0)


def test_the_target_falls_to_the_share_asked_for_just_before_the_support_is_fixed() -> None:
    schedule = SparsitySchedule(1000, keep=0.02, fix_at=0.8)
    targets = [schedule.target_share(step) for step in range(1001)]
    assert targets[0] == 1.0
    assert all(before >= after for before, after in itertools.pairwise(targets))
    assert targets[round(MET_AT * 800) :] == pytest.approx([0.02] * len(targets[round(MET_AT * 800) :]))
    assert schedule.target_share(700) > 0.02
    assert SparsitySchedule(1000, price=1.0).target_share(900) == 1.0


def test_the_price_rises_where_too_much_is_kept_and_falls_where_too_little_is() -> None:
    schedule = SparsitySchedule(1000, keep=0.1)
    before = Steering(1.0, schedule.target_share(400), 400.0)
    aim = schedule.target_share(405)
    assert schedule.steer(before, 405, aim).price == pytest.approx(1.0)
    assert schedule.steer(before, 405, 1.2 * aim).price > 1.05
    assert schedule.steer(before, 405, 0.8 * aim).price < 0.95
    assert schedule.steer(before, 405, 0.0).price == pytest.approx(math.exp(-MOST_PRICE_CHANGE))
    assert schedule.steer(before, 405, 0.07) == (schedule.steer(before, 405, 0.07).price, 0.07, 405.0)


def test_a_price_that_is_given_stays() -> None:
    schedule = SparsitySchedule(1000, price=3.0)
    assert schedule.start() == Steering(3.0)
    assert schedule.steer(schedule.start(), 500, 0.9) == Steering(3.0, 0.9, 500.0)
    assert SparsitySchedule(1000, keep=0.1).start().price == START_PRICE


def test_logits_stand_still_while_fewer_are_left_than_are_aimed_at() -> None:
    schedule = SparsitySchedule(1000, keep=0.1)
    aim = schedule.target_share(300)
    assert schedule.logit_lr_at(300, Steering(1.0, 0.99 * BRAKE * aim, 295.0)) == 0.0
    assert schedule.logit_lr_at(300, Steering(1.0, 1.01 * BRAKE * aim, 295.0)) == schedule.logit_lr_at(300) > 0.0


@pytest.mark.parametrize("steps", [1, 7, 100, 2000])
def test_the_share_is_read_now_and_then_and_last_before_the_support_is_fixed(steps: int) -> None:
    schedule = SparsitySchedule(steps, keep=0.1)
    read = [step for step in range(steps + 1) if schedule.reads(step)]
    assert read[-1] == schedule.fix_step
    assert 0 not in read
    assert len(read) <= 201
    assert SparsitySchedule(100, keep=0.1, read_every=30).reads(30)
    assert not SparsitySchedule(100, keep=0.1, read_every=30).reads(31)


def test_noise_lowers_the_ceiling_and_the_threshold() -> None:
    quiet, noisy = SparsitySchedule(10, price=1.0), SparsitySchedule(10, price=1.0, noise=0.2)
    assert (quiet.ceiling, quiet.threshold) == (1.0, 0.5)
    assert (noisy.ceiling, noisy.threshold) == (0.8, 0.4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either keep, the share of connections to keep, or price"),
        ({"keep": 0.1, "price": 1.0}, "got keep=0.1 and price=1.0"),
        ({"keep": 0.0}, "keep must lie strictly between 0 and 1, got 0.0"),
        ({"keep": 1.0}, "keep must lie strictly between 0 and 1, got 1.0"),
        ({"price": -1.0}, "price"),
        ({"price": 1.0, "warmup": -0.1}, r"warmup is a share of the steps and must lie in \[0, 1\], got -0.1"),
        ({"price": 1.0, "fix_at": 1.1}, r"fix_at is a share of the steps and must lie in \[0, 1\], got 1.1"),
        ({"price": 1.0, "warmup": 0.8}, "fix_at must be above warmup.*fix_at=0.8 and warmup=0.8"),
        ({"price": 1.0, "noise": 0.6}, r"noise is the share dropped and must lie in \[0, 0.5\], got 0.6"),
        ({"price": 1.0, "logit_lr": 0.0}, "logit_lr"),
        ({"price": 1.0, "read_every": 0}, "read_every"),
        ({"price": 1.0, "steps": 0}, "steps"),
        ({"price": 1.0, "steps": 1, "fix_at": 0.4}, "steps=1 and fix_at=0.4 fix the support before the first step"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SparsitySchedule(**({"steps": 100} | options))
