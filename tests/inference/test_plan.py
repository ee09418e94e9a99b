"""SparsityPlan: the share asked for is met, phases come in time, runs resume bit for bit, misuse is said by name."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError
from dropconnectpp.inference.plan import ON
from dropconnectpp.layers.base import masked_layers

STEPS = 20
X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def network(seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    return dcpp.convert(plain, preset="sparse", **options)


def bound(model: nn.Module, **options: Any) -> dcpp.ELBO:
    return dcpp.ELBO(model, dcpp.categorical, num_data=len(X), generator=torch.Generator().manual_seed(1), **options)


def planned(steps: int = STEPS, seed: int = 0, **options: Any) -> tuple[nn.Module, dcpp.ELBO, dcpp.SparsityPlan]:
    model = network(seed)
    elbo = bound(model)
    return model, elbo, dcpp.SparsityPlan(elbo, steps, **({"price": 0.5} | options))


def train(
    elbo: dcpp.ELBO,
    plan: dcpp.SparsityPlan,
    optimizer: torch.optim.Optimizer,
    steps: int,
    each: Callable[[], object] = lambda: None,
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        elbo(X, Y).loss.backward()
        optimizer.step()
        plan.step()
        each()


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, **options)


def logits(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith("_logit")}


def weights(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if not name.endswith("_logit")]


def everything(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# ------------------------------------------------------------------------------------- the share


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    data = load_digits()
    return torch.as_tensor(data.data / 16.0).float(), torch.as_tensor(data.target)


OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4),
}


@pytest.mark.parametrize(("kind", "keep"), [("Adam", 0.2), ("Adam", 0.04), ("SGD with momentum", 0.1)])
def test_the_share_is_met_within_a_tenth_whatever_the_optimiser(kind: str, keep: float, digits: Any) -> None:
    x, y = digits
    torch.manual_seed(0)
    model = dcpp.convert(nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)), preset="sparse")
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=1200)
    plan = dcpp.SparsityPlan(elbo, 400, keep=keep)
    optimizer = OPTIMISERS[kind](model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(400):
            rows = torch.randint(1200, (64,))
            optimizer.zero_grad()
            elbo(x[rows], target=y[rows]).loss.backward()
            optimizer.step()
            plan.step()
    kept = [layer.weight_kept for layer in masked_layers(model).values()]
    share = sum(int(one.sum()) for one in kept) / sum(one.numel() for one in kept)
    assert share == plan.share_kept
    assert abs(share / keep - 1.0) < 0.1
    model.eval()
    accuracy = (model(x[1200:]).argmax(1) == y[1200:]).double().mean()
    assert accuracy > (0.6 if keep == 0.04 else 0.85)
    dense = dcpp.to_dense(model)
    assert sum(int((layer.weight != 0).sum()) for layer in dense if isinstance(layer, nn.Linear)) == sum(
        int(one.sum()) for one in kept
    )
    torch.testing.assert_close(dense(x), model(x))


def test_a_higher_price_keeps_less() -> None:
    shares = []
    for price in (0.02, 0.5):
        model, elbo, plan = planned(100, price=price, fix_at=1.0)
        train(elbo, plan, adam(model), 100)
        shares.append(plan.share_kept)
    assert shares[1] < shares[0] - 0.2


# ------------------------------------------------------------------------------------- the phases


def test_phases_the_kl_and_the_price_go_as_the_schedule_says() -> None:
    model, elbo, plan = planned(price=2.0, warmup=0.25, fix_at=0.75)
    seen: list[tuple[str, float, float]] = []
    train(elbo, plan, adam(model), STEPS, lambda: seen.append((plan.phase, plan.price, elbo.kl_weight)))
    assert [phase for phase, _, _ in seen] == ["rise"] * 4 + ["learn"] * 10 + ["fixed"] * 6
    assert [price for _, price, _ in seen[:6]] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0])
    full = 2.0 / torch.log(torch.tensor(99.0)).item()
    assert [weight for _, _, weight in seen[:5]] == pytest.approx([full * part for part in (0.2, 0.4, 0.6, 0.8, 1.0)])
    assert [weight for _, _, weight in seen[14:]] == [0.0] * 6
    assert plan.steps_done == STEPS
    assert repr(plan) == f"SparsityPlan(price=2.0, step {STEPS} of {STEPS}, phase='fixed')"


def test_the_support_is_where_the_mean_gate_was_above_a_half_and_stays() -> None:
    model, elbo, plan = planned(fix_at=0.5, logit_lr=0.5)
    optimizer = adam(model)
    train(elbo, plan, optimizer, STEPS // 2 - 1)
    plan._fix()  # what the next step would do, without moving the log-odds before
    before = {name: layer.weight_kept.clone() for name, layer in masked_layers(model).items()}
    assert 0 < sum(int(kept.sum()) for kept in before.values()) < 8 * 12 + 12 * 3
    train(elbo, plan, optimizer, STEPS // 2)
    for name, layer in masked_layers(model).items():
        assert torch.equal(layer.weight_kept, before[name])
        assert (layer.weight_logit == ON).all()
        assert not layer.weight_logit.requires_grad
        assert torch.equal(layer.keep_probability(), before[name].float())


def test_the_support_is_read_off_the_log_odds_of_that_moment() -> None:
    model, elbo, plan = planned(fix_at=0.5, logit_lr=0.5)
    train(elbo, plan, adam(model), STEPS // 2 - 1)
    with torch.no_grad():
        model[0].weight_logit.copy_(torch.linspace(-1.0, 1.0, 96).view(12, 8))
        model[0].bias_logit.fill_(1e-3)
    share = plan.share_kept
    plan._fix()
    assert model[0].weight_kept.flatten().tolist() == [False] * 48 + [True] * 48
    assert model[0].bias_kept.all()
    assert plan.share_kept == share


def test_weights_train_on_once_the_support_is_fixed_and_what_is_off_stays_off() -> None:
    model, elbo, plan = planned(fix_at=0.5, logit_lr=0.5)
    optimizer = adam(model)
    train(elbo, plan, optimizer, STEPS // 2)
    before = everything(model)
    train(elbo, plan, optimizer, STEPS // 2)
    moved = (model[0].weight != before["0.weight"]) & model[0].weight_kept
    assert moved.any()
    dense = dcpp.to_dense(model)
    assert torch.equal(dense[0].weight != 0, model[0].weight_kept)


def test_once_fixed_without_noise_every_pass_is_the_same() -> None:
    model, elbo, plan = planned(fix_at=0.5)
    train(elbo, plan, adam(model), STEPS)
    model.train()
    assert torch.equal(model(X), model(X))
    torch.testing.assert_close(model(X), model.eval()(X))


def test_at_one_the_support_is_never_fixed() -> None:
    model, elbo, plan = planned(fix_at=1.0)
    train(elbo, plan, adam(model), STEPS)
    assert plan.phase == "learn"
    assert model[0].weight_kept is None


def test_what_was_pruned_before_does_not_come_back() -> None:
    model = dcpp.prune(network(), keep=0.5)
    before = model[0].weight_kept.clone()
    elbo = bound(model)
    plan = dcpp.SparsityPlan(elbo, STEPS, price=1e-3)
    assert plan.share_kept == 0.5
    train(elbo, plan, adam(model), STEPS)
    assert not (model[0].weight_kept & ~before).any()


# ------------------------------------------------------------------------------------- noise


def test_noise_is_a_ceiling_before_and_dropconnect_after() -> None:
    model, elbo, plan = planned(noise=0.2, fix_at=0.5)
    highest: list[float] = []

    def look() -> None:
        highest.append(max(float(layer.keep_probability().detach().max()) for layer in masked_layers(model).values()))

    look()
    train(elbo, plan, adam(model), STEPS, look)
    assert max(highest) <= 0.8 + 1e-6
    pi = model[0].keep_probability()
    torch.testing.assert_close(pi, 0.8 * model[0].weight_kept)
    model.eval()
    torch.testing.assert_close(dcpp.to_dense(model)[0].weight, 0.8 * model[0].weight * model[0].weight_kept)


def test_noise_moves_the_threshold_to_half_of_the_ceiling() -> None:
    model, _, plan = planned(noise=0.2)
    with torch.no_grad():
        for layer in masked_layers(model).values():
            layer.weight_logit.fill_(torch.logit(torch.tensor(0.45)))
    assert plan.share_kept == 1.0
    plan._fix()
    assert model[0].weight_kept.all()


# ------------------------------------------------------------------------------- whose the log-odds are


@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
        lambda m: torch.optim.SGD(weights(m), lr=1e-2, momentum=0.9),
        lambda m: torch.optim.SGD(dcpp.parameter_groups(m, lr=1e-2, logit_lr=7.0), momentum=0.9),
    ],
    ids=["held", "not held", "with a step size of their own"],
)
def test_it_is_all_one_whether_the_optimiser_holds_the_log_odds(make: Any) -> None:
    reference, elbo, plan = planned()
    train(elbo, plan, torch.optim.SGD(weights(reference), lr=1e-2, momentum=0.9), STEPS)
    model, elbo, plan = planned()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(elbo, plan, make(model), STEPS)
    assert_same(everything(model), everything(reference))


def test_weight_decay_does_nothing_to_log_odds_and_nothing_is_said_of_it() -> None:
    found = []
    for decay in (0.0, 0.5):
        model, elbo, plan = planned(price=1e-6)
        optimizer = torch.optim.AdamW([{"params": weights(model), "weight_decay": 0.0}], lr=1e-3)
        optimizer.add_param_group({"params": [p for p in model.parameters() if p not in set(weights(model))]})
        optimizer.param_groups[1]["weight_decay"] = decay
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(elbo, plan, optimizer, STEPS - 5)
        found.append(everything(model))
    assert_same(*found)


def test_two_optimisers_may_share_the_model() -> None:
    reference, elbo, plan = planned()
    train(elbo, plan, torch.optim.SGD(reference.parameters(), lr=1e-2), STEPS)
    model, elbo, plan = planned()
    first = torch.optim.SGD(model[0].parameters(), lr=1e-2)
    second = torch.optim.SGD(model[2].parameters(), lr=1e-2)
    for _ in range(STEPS):
        model.zero_grad()
        elbo(X, Y).loss.backward()
        first.step()
        second.step()
        plan.step()
    assert_same(everything(model), everything(reference))


class ByHand:
    """An optimiser that is none of torch's."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter -= 1e-2 * parameter.grad


def test_an_optimiser_that_is_none_of_torchs_may_have_the_weights() -> None:
    reference, elbo, plan = planned()
    train(elbo, plan, torch.optim.SGD(reference.parameters(), lr=1e-2), STEPS)
    model, elbo, plan = planned()
    optimizer = ByHand(weights(model))
    for _ in range(STEPS):
        model.zero_grad()
        elbo(X, Y).loss.backward()
        optimizer.step()
        plan.step()
    for name, value in everything(model).items():
        torch.testing.assert_close(value, reference.state_dict()[name])


def test_one_that_moves_the_log_odds_is_found_out() -> None:
    model, elbo, plan = planned()
    optimizer = ByHand(list(model.parameters()))
    elbo(X, Y).loss.backward()
    optimizer.step()
    plan.step()
    elbo(X, Y).loss.backward()
    optimizer.step()
    with pytest.raises(ArgumentError, match="something else moves the log-odds"):
        plan.step()


def test_gradients_of_several_minibatches_add_up() -> None:
    reference, elbo, plan = planned()
    found = copy.deepcopy(elbo.generator.get_state())
    train(elbo, plan, torch.optim.SGD(reference.parameters(), lr=1e-2), 1)
    model, elbo, plan = planned()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for part in range(4):  # one mask for all, so that the parts' mean is the whole
        elbo.generator.set_state(found)
        (elbo(X[part::4], Y[part::4]).loss / 4).backward()
    optimizer.step()
    plan.step()
    for name, value in everything(model).items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_step_with_a_closure_is_a_step_like_any_other(by_name: bool) -> None:
    """As Lightning and skorch step: the gradients come inside."""
    found = []
    for closed in (False, True):
        model, elbo, plan = planned(60, price=0.5)
        optimizer = adam(model)
        torch.manual_seed(1)
        for _ in range(60):

            def closure(elbo: dcpp.ELBO = elbo, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = elbo(X, target=Y).loss
                loss.backward()
                return loss

            if not closed:
                closure()
                optimizer.step()
            elif by_name:
                optimizer.step(closure=closure)
            else:
                optimizer.step(closure)
            plan.step()
        found.append(everything(model))
    assert_same(*found)


def test_a_call_without_a_step_of_an_optimiser_is_an_error() -> None:
    model, elbo, plan = planned()
    optimizer = adam(model)
    train(elbo, plan, optimizer, 1)
    before = everything(model)
    elbo(X, Y).loss.backward()
    with pytest.raises(ArgumentError, match=r"no optimiser had stepped since.*after the last of their minibatches"):
        plan.step()
    assert plan.steps_done == 1
    assert_same(everything(model), before)
    optimizer.step()  # the gradients are still there
    plan.step()
    assert plan.steps_done == 2


def test_a_call_without_a_gradient_is_an_error() -> None:
    _, _, plan = planned()
    with pytest.raises(ArgumentError, match=r"no gradient of the log-odds. Call it after loss.backward\(\)"):
        plan.step()
    model, elbo, _ = planned()
    for logit in (p for name, p in model.named_parameters() if name.endswith("_logit")):
        logit.requires_grad_(False)
    plan = dcpp.SparsityPlan(elbo, STEPS, price=1.0)
    elbo(X, Y).loss.backward()
    with pytest.raises(ArgumentError, match="no log-odds need a gradient"):
        plan.step()


def test_too_many_calls_are_said_once_and_move_nothing() -> None:
    for fix_at in (0.8, 1.0):
        model, elbo, plan = planned(fix_at=fix_at)
        optimizer = adam(model)
        train(elbo, plan, optimizer, STEPS)
        before = logits(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(elbo, plan, optimizer, 3)
        assert [str(one.message)[:54] for one in caught] == ["SparsityPlan.step was called more often than its steps"]
        assert_same(logits(model), before)


# ------------------------------------------------------------------------------- scaled gradients


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_changes_nothing(fused: bool) -> None:
    reference, elbo, plan = planned()
    train(elbo, plan, adam(reference, fused=fused), 8)
    model, elbo, plan = planned()
    optimizer, scaler = adam(model, fused=fused), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(8):
        optimizer.zero_grad()
        scaler.scale(elbo(X, Y).loss).backward()
        scaler.step(optimizer)
        scaler.update()
        plan.step()
    for name, value in everything(model).items():
        torch.testing.assert_close(value, reference.state_dict()[name])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("when", [0, 3])
def test_a_step_that_a_scaler_skips_moves_no_log_odds(fused: bool, when: int) -> None:
    model, elbo, plan = planned()
    optimizer, scaler = adam(model, fused=fused), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(5):
        before = logits(model)
        optimizer.zero_grad()
        scaler.scale(elbo(X, Y).loss).backward()
        if step == when:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        plan.step()
        assert all(torch.equal(before[name], value) for name, value in logits(model).items()) == (step == when)
    assert plan.steps_done == 5


# ------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("at", [0, 3, 10, 15, 16, 18], ids=lambda at: f"after {at}")
@pytest.mark.parametrize("aim", [{"keep": 0.3}, {"price": 0.5, "noise": 0.1}], ids=["keep", "price and noise"])
@pytest.mark.parametrize("plan_first", [False, True])
@pytest.mark.filterwarnings("ignore:SparsityPlan. keep")
def test_a_run_resumes_bit_for_bit(at: int, aim: dict[str, Any], plan_first: bool) -> None:
    aim = {"price": None, "read_every": 2, "logit_lr": 0.2} | aim
    model, elbo, plan = planned(**aim)
    optimizer = adam(model)
    train(elbo, plan, optimizer, at)
    file = io.BytesIO()
    parts = {"elbo": elbo, "plan": plan, "optimizer": optimizer}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    masks = elbo.generator.get_state()
    train(elbo, plan, optimizer, STEPS - at)

    again, elbo_again, plan_again = planned(seed=7, **aim)
    optimizer_again = adam(again)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    (plan_again if plan_first else elbo_again).load_state_dict(saved["plan" if plan_first else "elbo"])
    (elbo_again if plan_first else plan_again).load_state_dict(saved["elbo" if plan_first else "plan"])
    optimizer_again.load_state_dict(saved["optimizer"])
    elbo_again.generator.set_state(masks)
    assert plan_again.phase == plan.schedule.phase(at)
    train(elbo_again, plan_again, optimizer_again, STEPS - at)
    assert_same(everything(again), everything(model))
    assert (plan_again.price, plan_again.share_kept) == (plan.price, plan.share_kept)


def test_a_state_may_be_loaded_before_a_scaler_skips_the_first_step() -> None:
    model, elbo, plan = planned()
    model.load_state_dict(network(3).state_dict())
    elbo(X, Y).loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(torch.nan)
    plan.step()
    assert_same(logits(model), logits(network(3)))


def test_a_plan_with_other_settings_is_refused_and_nothing_changes() -> None:
    _, _, plan = planned(price=0.5)
    _, _, other = planned(price=0.7, warmup=0.2)
    before = other.state_dict()
    with pytest.raises(ArgumentError, match=r"price=0.5 \(here 0.7\), warmup=0.3 \(here 0.2\)"):
        other.load_state_dict(plan.state_dict())
    with pytest.raises(ArgumentError, match="no state of a SparsityPlan: fixed, logit_optimizer"):
        other.load_state_dict({"schedule": {}, "steps_done": 1})
    assert other.state_dict() == before


def test_a_second_plan_takes_the_first_ones_place() -> None:
    reference, elbo, plan = planned(price=0.5)
    train(elbo, plan, adam(reference), STEPS)
    model, elbo, first = planned(price=3.0)
    train(elbo, first, adam(network()), 0)
    elbo.kl_weight = 0.1  # what the first has set
    plan = dcpp.SparsityPlan(elbo, STEPS, price=0.5)
    train(elbo, plan, adam(model), STEPS)
    assert_same(everything(model), everything(reference))
    assert first.steps_done == 0
    del first, plan
    gc.collect()


# ----------------------------------------------------------------------------------- other networks


def test_layers_that_share_a_weight_count_once_and_keep_one_support() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    plain[2].weight = plain[0].weight
    model = dcpp.convert(plain, preset="sparse")
    elbo = bound(model)
    plan = dcpp.SparsityPlan(elbo, STEPS, price=0.5, logit_lr=0.5)
    with torch.no_grad():
        model[0].weight_logit[0].fill_(-1.0)
    assert plan.share_kept == pytest.approx(1.0 - 8 / (64 + 24))
    train(elbo, plan, adam(model), STEPS)
    assert torch.equal(model[0].weight_kept, model[2].weight_kept)


def test_convolutions_and_every_parameter_of_theirs_are_planned() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 3))
    model = dcpp.convert(plain, preset="sparse")
    images, kinds = torch.randn(32, 1, 8, 8), torch.arange(32) % 3
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=32)
    plan = dcpp.SparsityPlan(elbo, 150, keep=0.3)
    optimizer = adam(model)
    for _ in range(150):
        optimizer.zero_grad()
        elbo(images, kinds).loss.backward()
        optimizer.step()
        plan.step()
    kept = [layer.weight_kept for layer in masked_layers(model).values()]
    assert [one.shape for one in kept] == [(4, 1, 3, 3), (4, 2, 3, 3), (3, 64)]
    assert plan.share_kept == sum(int(one.sum()) for one in kept) / sum(one.numel() for one in kept)
    assert plan.share_kept == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize("estimator", ["bbvi", "straight-through", "local", "concrete", "disarm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_estimator_and_precision_can_be_planned(estimator: str, dtype: torch.dtype) -> None:
    model = network(estimator=estimator).to(dtype)
    elbo = bound(model)
    plan = dcpp.SparsityPlan(elbo, STEPS, price=20.0, logit_lr=0.5)
    optimizer = adam(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        elbo(X.to(dtype), Y).loss.backward()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # at this price a layer may keep nothing
            plan.step()
    assert plan.share_kept < 0.7
    assert model[0].weight_logit.dtype == dtype


def test_layers_pay_in_proportion_to_their_kl_weight() -> None:
    model = network()
    model[0].kl_weight = 2.0
    elbo = bound(model)
    plan = dcpp.SparsityPlan(elbo, STEPS, price=3.0, warmup=0.0)
    assert elbo.kl_weight * 2.0 * torch.log(torch.tensor(99.0)).item() == pytest.approx(3.0)
    assert plan.price == 3.0


def test_where_gradients_are_reduced_over_processes_the_log_odds_go_on_having_one(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    model, elbo, plan = planned()
    train(elbo, plan, adam(model), STEPS)
    assert plan.phase == "fixed"
    assert all(p.requires_grad for p in model.parameters())
    assert (model[0].weight_logit == ON).all()


# ------------------------------------------------------------------------------------- what is refused


def half(model: nn.Module) -> nn.Module:
    return model.half()


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "a plain model": (lambda: nn.Linear(8, 3), {}, "needs DropConnect\\+\\+ layers, and the ELBO's model has none"),
    "a fixed rate": (lambda: dcpp.convert(nn.Linear(8, 3), kind="dropconnect"), {}, "needs DropConnect\\+\\+ layers"),
    "probabilities": (lambda: network(parameterisation="probability"), {}, "got 'probability' and 'marginal' in 0"),
    "a learned hyper-posterior": (lambda: network(hyper="learned"), {}, "got 'logit' and 'learned' in 0"),
    "half precision": (lambda: half(network()), {}, "in float32 or float64, got torch.float16 in 0"),
    "a free layer": (lambda: network(kl_weight=0.0), {}, "a kl_weight above 0, got 0.0 in 0"),
    "a prior that would keep": (lambda: network(alpha=9.0, beta=1.0), {}, "beta is above alpha, got alpha=9.0"),
    "too low a start": (lambda: network(keep_probability=0.4), {"keep": 0.1}, "only 0 of the weights have pi~ > 0.5"),
    "less than one": (network, {"keep": 0.001}, "keep=0.001 of 132 weights is less than one. The least is 0.0076"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused_by_name(name: str) -> None:
    make, options, message = REFUSED[name]
    model = make()
    before = everything(model)
    with pytest.raises(ArgumentError, match=message):
        dcpp.SparsityPlan(bound(model), STEPS, **(options or {"price": 1.0}))
    assert_same(everything(model), before)


def test_a_kl_weight_of_the_users_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"sets the ELBO's kl_weight, got kl_weight=0\.5"):
        dcpp.SparsityPlan(bound(network(), kl_weight=0.5), STEPS, price=1.0)


# ------------------------------------------------------------------------------------- what is said


@pytest.fixture
def said() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def test_a_share_that_was_not_met_is_said_with_what_to_do(said: list[warnings.WarningMessage]) -> None:
    model, elbo, plan = planned(price=None, keep=0.05, logit_lr=1e-4)
    train(elbo, plan, adam(model), STEPS)
    (one,) = said
    assert "keep=0.05 was not met: 1 of the weights are kept" in str(one.message)
    assert "larger logit_lr" in str(one.message)
    assert one.filename == __file__


def test_layers_without_a_connection_are_said_by_name(said: list[warnings.WarningMessage]) -> None:
    model, _, plan = planned()
    with torch.no_grad():
        model[2].weight_logit.fill_(-1.0)
    plan._fix()
    assert [str(one.message)[:35] for one in said] == ["SparsityPlan: 2 keeps no weight and"]
