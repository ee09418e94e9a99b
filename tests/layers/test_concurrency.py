"""One model, many at once: threads, tasks, generators and nested contexts each get what they would get alone."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.layers.passes import current
from pass_cases import trace_of

THREADS, CALLS = 8, 100
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _interleaved() -> Iterator[None]:
    """Threads take turns as often as Python lets them, and each does its own arithmetic."""
    interval, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(1e-6)
    torch.set_num_threads(1)
    yield
    sys.setswitchinterval(interval)
    torch.set_num_threads(threads)


def network() -> nn.Sequential:
    """Layers of every kind of gate, one large enough for NumPy's generator, and layers that modes matter to."""
    torch.manual_seed(1)
    model = nn.Sequential(
        dcpp.DropConnectPPLinear(6, 100, activation=nn.Tanh()),
        nn.BatchNorm1d(100),
        dcpp.DropConnectPPLinear(100, 100, activation=nn.Tanh(), estimator="disarm"),
        nn.Dropout(0.5),
        dcpp.DropConnectPPLinear(100, 5, activation=nn.Tanh(), mask="example", estimator="concrete"),
        dcpp.DropConnectLinear(5, 3, activation=nn.Identity()),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mean(model: nn.Module, seed: int) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(X)
    return output


def predicted(model: nn.Module, seed: int, average: str = "probabilities") -> Tensor:
    found = dcpp.predict(model, X, num_samples=2, average=average, likelihood=dcpp.categorical, generator=seeded(seed))
    return torch.cat(
        [found.mean, *(x.view(-1, 1) for x in (found.entropy, found.mutual_information) if x is not None)], 1
    )


def averaged(model: nn.Module, seed: int) -> Tensor:
    return predicted(model, seed, "activations")


def sampled(model: nn.Module, seed: int) -> Tensor:
    with torch.no_grad(), dcpp.sampling(model, seeded(seed)):
        return torch.cat([model(X), model(X)])


def forced(model: nn.Module, seed: int) -> Tensor:
    generator = seeded(seed)
    masks = {
        f"{index}.{name}": torch.rand(getattr(model[index], name).shape, generator=generator) < 0.5
        for index in (0, 4)
        for name in ("weight", "bias")
    }
    with torch.no_grad(), dcpp.forced_masks(model, masks), dcpp.sampling(model, generator):
        output: Tensor = model(X)
    return output


def trained(model: nn.Module, seed: int) -> Tensor:
    """A bound in eval mode, which leaves no moment behind, and a gradient by an input of its own."""
    x = X.clone().requires_grad_()
    with dcpp.sampling(model, seeded(seed)):
        output = model(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    return gradient


USES: dict[str, Callable[[nn.Module, int], Tensor]] = {
    "mean": mean,
    "predict, networks": predicted,
    "predict, activations": averaged,
    "sampling": sampled,
    "forced masks": forced,
    "gradient": trained,
}


@contextmanager
def leaving_no_trace(model: nn.Module) -> Iterator[None]:
    before, state = trace_of(model), {key: value.clone() for key, value in model.state_dict().items()}
    yield
    assert trace_of(model) == before
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert current() == []


def in_threads(works: list[Callable[[], None]]) -> None:
    """All at once, from one starting line; the first error is raised here."""
    line = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        line.wait()
        work()

    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(run, work) for work in works]:
            future.result()


# ----------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("kind", [*USES, "all of them"])
def test_eight_threads_get_the_serial_answers_bit_for_bit(kind: str) -> None:
    model = network().eval()
    uses = list(USES.values()) if kind == "all of them" else [USES[kind]]
    jobs = [(uses[(thread + call) % len(uses)], call) for thread in range(THREADS) for call in range(CALLS)]
    expected = {job: job[0](model, job[1]) for job in set(jobs)}
    wrong: list[int] = []

    def work(thread: int) -> None:
        for use, seed in jobs[thread * CALLS : (thread + 1) * CALLS]:
            if not torch.equal(use(model, seed), expected[use, seed]):
                wrong.append(seed)

    with leaving_no_trace(model):
        in_threads([lambda thread=thread: work(thread) for thread in range(THREADS)])
    assert wrong == []


@pytest.mark.parametrize("use", [predicted, averaged])
def test_predictions_of_a_model_in_train_mode_leave_its_modes_alone(use: Callable[[nn.Module, int], Tensor]) -> None:
    """Each puts the model into eval mode: none may put it back while another is under way, or not at all."""
    model = network().train()
    model[3].eval()  # a mixture of modes
    expected = [use(model, seed) for seed in range(10)]
    wrong: list[int] = []

    def work() -> None:
        for seed in list(range(10)) * 3:
            if not torch.equal(use(model, seed), expected[seed]):
                wrong.append(seed)

    with leaving_no_trace(model):
        in_threads([work] * THREADS)
    assert wrong == []


def test_training_in_threads_draws_for_each_call() -> None:
    """Calls outside every context: every thread backpropagates through the masks of its own call."""
    layer = dcpp.DropConnectPPLinear(120, 120, bias=False)
    nn.init.ones_(layer.weight)

    def work() -> None:
        for _ in range(30):
            output = layer(torch.eye(120))
            (gradient,) = torch.autograd.grad(output, layer.weight, torch.ones(120, 120))
            assert torch.equal(gradient.T, output.detach())  # each is the mask

    with leaving_no_trace(layer):
        in_threads([work] * THREADS)


def test_bounds_of_one_model_in_threads() -> None:
    """Each thread's ELBO has the gradient of the masks it drew."""
    model = nn.Sequential(dcpp.DropConnectPPLinear(6, 100), nn.Tanh(), dcpp.DropConnectPPLinear(100, 3)).double()
    x, y = X.double(), torch.tensor([0, 1, 2, 0])

    def gradient(seed: int) -> Tensor:
        elbo = dcpp.ELBO(model, dcpp.categorical, num_data=9, num_samples=2, generator=seeded(seed))
        for _ in range(2):
            loss = elbo(x, y).loss
        found = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([g.flatten() for g in found])

    expected = [gradient(seed) for seed in range(10)]
    wrong: list[int] = []

    def work() -> None:
        for seed in range(10):
            if not torch.equal(gradient(seed), expected[seed]):
                wrong.append(seed)

    with leaving_no_trace(model):
        in_threads([work] * THREADS)
    assert wrong == []


def test_a_thread_begun_inside_a_context_is_outside_it() -> None:
    model = network().eval()
    expected = mean(model, 0), sampled(model, 5)
    found: list[Tensor] = []

    def work() -> None:
        found.extend([mean(model, 0), sampled(model, 5)])

    with leaving_no_trace(model), dcpp.sampling(model, seeded(1)):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not torch.equal(mean(model, 0), expected[0])  # the thread that is inside samples
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_a_thread_that_is_given_the_context_is_inside_it_until_it_closes() -> None:
    """`asyncio.to_thread` and some thread pools hand a copy of the context on: it must not outlive the original."""
    model = network().eval()
    plain = mean(model, 0)
    opened, closed = threading.Event(), threading.Event()
    found: list[Tensor] = []

    def work() -> None:
        found.append(mean(model, 0))
        opened.set()
        assert closed.wait(60)
        found.append(mean(model, 0))

    with leaving_no_trace(model):
        with dcpp.sampling(model, seeded(1)):
            thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
            thread.start()
            assert opened.wait(60)
        closed.set()
        thread.join()
    assert torch.equal(found[0], sampled(model, 1)[:4])
    assert torch.equal(found[1], plain)


def test_a_context_that_closes_while_a_call_is_under_way_is_closed_for_the_next() -> None:
    """The call began inside and ends outside: neither its masks nor its hooks stay in the thread."""
    inside, go = threading.Event(), threading.Event()

    class Slow(nn.Module):
        wait = True

        def forward(self, x: Tensor) -> Tensor:
            if self.wait:
                inside.set()
                assert go.wait(60)
            return x

    slow = Slow()
    model = nn.Sequential(dcpp.DropConnectPPLinear(6, 5), slow, dcpp.DropConnectPPLinear(5, 3)).eval()
    found: list[Tensor] = []

    def work() -> None:
        found.append(mean(model, 0))
        slow.wait = False
        found.append(mean(model, 0))

    with dcpp.sampling(model, seeded(1)):
        thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
        thread.start()
        assert inside.wait(60)
    go.set()
    thread.join()
    assert len(found) == 2
    assert torch.equal(found[1], mean(model, 0))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


# ------------------------------------------------------------------------------------------- tasks


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside another context"])
def test_interleaved_tasks_get_the_serial_answers(inside: bool) -> None:
    model = network().eval()
    masks = [
        {f"0.{s}": torch.rand(getattr(model[0], s).shape, generator=seeded(seed)) < 0.5 for s in ("weight", "bias")}
        for seed in range(6)
    ]

    async def sampling_task(seed: int) -> Tensor:
        outputs = []
        with dcpp.sampling(model, seeded(seed)):
            for _ in range(5):
                outputs.append(mean(model, 0))
                await asyncio.sleep(0)
        return torch.cat([*outputs, mean(model, 0)])

    async def forcing_task(seed: int) -> Tensor:
        outputs = []
        with dcpp.forced_masks(model, masks[seed]):
            for _ in range(5):
                outputs.append(mean(model, 0))
                await asyncio.sleep(0)
                outputs.append(predicted(model, seed)[:, :3])
        return torch.cat([*outputs, mean(model, 0)])

    async def together() -> list[Tensor]:
        jobs = [task(seed) for seed in range(6) for task in (sampling_task, forcing_task)]
        return await asyncio.gather(*jobs)

    expected = [asyncio.run(task(seed)) for seed in range(6) for task in (sampling_task, forcing_task)]
    with leaving_no_trace(model):
        if inside:
            outer = model[0].weight.new_ones(model[0].weight.shape), model[0].bias.new_ones(model[0].bias.shape)
            with dcpp.forced_masks(model, {"0.weight": outer[0], "0.bias": outer[1]}):
                one_by_one = [asyncio.run(task(seed)) for seed in range(6) for task in (sampling_task, forcing_task)]
                found = asyncio.run(together())
            expected = one_by_one
        else:
            found = asyncio.run(together())
    for one, alone in zip(found, expected, strict=True):
        assert torch.equal(one, alone)


def test_a_task_begun_inside_a_context_is_inside_it_until_it_closes() -> None:
    model = network().eval()
    plain = mean(model, 0)

    async def child() -> list[Tensor]:
        found = [mean(model, 0)]
        await asyncio.sleep(0.01)
        return [*found, mean(model, 0)]

    async def parent() -> list[Tensor]:
        with dcpp.sampling(model, seeded(1)):
            task = asyncio.create_task(child())
            await asyncio.sleep(0)
        return await task

    with leaving_no_trace(model):
        during, after = asyncio.run(parent())
    assert torch.equal(during, sampled(model, 1)[:4])
    assert torch.equal(after, plain)


# -------------------------------------------------------------------------------------- generators


def stream(model: nn.Module, seed: int) -> Iterator[Tensor]:
    with dcpp.sampling(model, seeded(seed)):
        while True:
            yield mean(model, 0)


def forcing(model: nn.Module, value: int) -> Iterator[Tensor]:
    masks = {f"{i}.{s}": torch.full_like(getattr(model[i], s), value) for i in (0, 4) for s in ("weight", "bias")}
    with dcpp.forced_masks(model, masks):
        while True:
            yield mean(model, 0)


@pytest.mark.parametrize("make", [stream, forcing])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_interleaved_generators_get_the_serial_answers_and_close_in_any_order(
    make: Callable[[nn.Module, int], Iterator[Tensor]], order: tuple[int, ...]
) -> None:
    model = network().eval()
    plain = mean(model, 0)
    expected = []
    for seed in range(3):
        alone = make(model, seed)
        expected.append([next(alone) for _ in range(6)])
        alone.close()  # type: ignore[attr-defined]
    with leaving_no_trace(model):
        generators = [make(model, seed) for seed in range(3)]
        found: list[list[Tensor]] = [[], [], []]
        for index in (0, 1, 2, 1, 0, 0, 2):
            found[index].append(next(generators[index]))
        left = list(order)
        for index in order:
            generators[index].close()  # type: ignore[attr-defined]
            left.remove(index)
            for other in left:
                found[other].append(next(generators[other]))
        assert torch.equal(mean(model, 0), plain)
    for mine, alone in zip(found, expected, strict=True):
        assert len(mine) >= 2
        for one, other in zip(mine, alone, strict=False):
            assert torch.equal(one, other)


def test_the_callers_own_context_comes_before_a_suspended_generators() -> None:
    model = network().eval()
    with leaving_no_trace(model):
        generator = stream(model, 1)
        next(generator)
        assert torch.equal(sampled(model, 2), sampled(model, 2))
        with dcpp.sampling(model, seeded(3)):
            first = mean(model, 0)
            second = next(generator)
            third = mean(model, 0)
        generator.close()  # type: ignore[attr-defined]
    assert torch.equal(torch.cat([first, third]), sampled(model, 3))
    assert torch.equal(second, sampled(model, 1)[4:])


def test_a_generator_left_half_way_and_collected_leaves_nothing() -> None:
    model = network().eval()
    plain = mean(model, 0)
    with leaving_no_trace(model):
        for make in (stream, forcing):
            generator = make(model, 1)
            next(generator)
            del generator
            gc.collect()
        assert torch.equal(mean(model, 0), plain)


def test_a_generator_closed_by_another_thread_or_task_leaves_nothing() -> None:
    model = network().eval()
    plain = mean(model, 0)

    def close(generator: Iterator[Tensor]) -> None:
        generator.close()  # type: ignore[attr-defined]

    with leaving_no_trace(model):
        for make in (stream, forcing):
            generator = make(model, 1)
            next(generator)
            in_threads([lambda generator=generator: close(generator)])
            assert torch.equal(mean(model, 0), plain)

    async def astream(seed: int) -> AsyncIterator[Tensor]:
        with dcpp.sampling(model, seeded(seed)):
            while True:
                yield mean(model, 0)
                await asyncio.sleep(0)

    async def main() -> list[Tensor]:
        first, second = astream(1), astream(2)
        found = [await anext(first), await anext(second), await anext(first), await anext(second)]
        await asyncio.create_task(first.aclose())  # type: ignore[attr-defined]
        found.append(await anext(second))
        await second.aclose()  # type: ignore[attr-defined]
        return [*found, mean(model, 0)]

    with leaving_no_trace(model):
        found = asyncio.run(main())
    assert torch.equal(torch.cat([found[0], found[2]]), sampled(model, 1))
    assert torch.equal(torch.cat([found[1], found[3]]), sampled(model, 2))
    assert torch.equal(found[5], plain)


@contextmanager
def mine(model: nn.Module, seed: int) -> Iterator[None]:
    """A context of the user's own: a generator too, whose contexts are meant for the body of its `with`."""
    with dcpp.sampling(model, seeded(seed)):
        yield


def test_contexts_made_of_contexts_act_on_their_body() -> None:
    model = network().eval()
    with leaving_no_trace(model):
        with dcpp.sampling(model, seeded(1)), mine(model, 2):
            inner = torch.cat([mean(model, 0), mean(model, 0)])
        with mine(model, 1), dcpp.sampling(model, seeded(3)):
            other = torch.cat([mean(model, 0), mean(model, 0)])
        with ExitStack() as stack:
            stack.enter_context(mine(model, 4))
            held = torch.cat([mean(model, 0), mean(model, 0)])

        def generate() -> Iterator[Tensor]:
            with mine(model, 5):
                while True:
                    yield mean(model, 0)

        first, second = generate(), stream(model, 6)
        both = [next(first), next(second), next(first), next(second)]
        first.close()  # type: ignore[attr-defined]
        second.close()  # type: ignore[attr-defined]
    assert torch.equal(inner, sampled(model, 2))
    assert torch.equal(other, sampled(model, 3))
    assert torch.equal(held, sampled(model, 4))
    assert torch.equal(torch.cat(both[::2]), sampled(model, 5))
    assert torch.equal(torch.cat(both[1::2]), sampled(model, 6))


# ------------------------------------------------------------------------------ nesting and order


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_contexts_may_close_in_any_order(order: tuple[int, ...]) -> None:
    """Whatever closes first, the innermost that is still open counts."""
    model = network().eval()
    plain = mean(model, 0)
    ones = {f"0.{s}": torch.ones_like(getattr(model[0], s)) for s in ("weight", "bias")}
    zeros = {key: torch.zeros_like(value) for key, value in ones.items()}
    made = [lambda: dcpp.forced_masks(model, ones), lambda: dcpp.sampling(model[0], seeded(1))]
    made.append(lambda: dcpp.forced_masks(model, zeros))
    with leaving_no_trace(model):
        contexts = [make() for make in made]
        for context in contexts:
            context.__enter__()
        left = [0, 1, 2]
        for index in order:
            contexts[index].__exit__(None, None, None)
            left.remove(index)
            found = mean(model, 0)
            with ExitStack() as stack:
                for other in left:
                    stack.enter_context(made[other]())
                expected = mean(model, 0)
            if left != [1]:  # a sampling context that has drawn before goes on from there
                assert torch.equal(found, expected)
            else:
                assert not torch.equal(found, plain)
        assert torch.equal(mean(model, 0), plain)


def test_two_bounds_sampled_at_once_keep_their_masks() -> None:
    """`with first.sample(), second.sample()`: the inner one's masks ran, and each one's terms are of its own."""
    model = nn.Sequential(dcpp.DropConnectPPLinear(6, 3, bias=False)).double()
    first, second = (dcpp.ELBO(model, dcpp.categorical, num_data=9, generator=seeded(seed)) for seed in (1, 2))
    x, y = X.double(), torch.tensor([0, 1, 2, 0])
    with leaving_no_trace(model):
        outer = first.sample()
        outer.__enter__()
        a = model(x)
        with second.sample():
            b = model(x)
        assert torch.equal(model(x), a)
        outer.__exit__(None, None, None)
    assert not torch.equal(a, b)
    again = dcpp.ELBO(model, dcpp.categorical, num_data=9, generator=seeded(2))(x, y)
    assert torch.equal(again.output, b)
    assert torch.equal(second.terms(b, y).loss, again.loss)


# ---------------------------------------------------------------------------------------- compiled


@pytest.fixture
def compiled() -> Iterator[tuple[nn.Module, nn.Module]]:
    """A small model in eval mode, and the same compiled into one graph."""
    torch.compiler.reset()
    torch.manual_seed(1)
    model = nn.Sequential(dcpp.DropConnectPPLinear(6, 9, activation=nn.Tanh()), dcpp.DropConnectPPLinear(9, 3)).eval()
    yield model, torch.compile(model, backend="eager", fullgraph=True)  # type: ignore[misc]
    torch.compiler.reset()


def given(model: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = seeded(seed)
    return {
        key: torch.rand(value.shape, generator=generator) < 0.5
        for key, value in model.named_parameters()
        if key.endswith(("weight", "bias"))
    }


def test_compiled_calls_in_interleaved_tasks_see_their_own_context(compiled: tuple[nn.Module, nn.Module]) -> None:
    """One compiled call between two awaits, in tasks of one thread, some of them outside every context."""
    model, fast = compiled
    expected = []
    for seed in range(5):
        with dcpp.forced_masks(model, given(model, seed)):
            expected.append(mean(model, 0))
    plain = mean(model, 0)

    async def inside(seed: int) -> list[Tensor]:
        found = []
        with dcpp.forced_masks(model, given(model, seed)):
            for _ in range(3):
                found.append(mean(fast, 0))
                await asyncio.sleep(0)
        return found

    async def outside() -> list[Tensor]:
        found = []
        for _ in range(4):
            found.append(mean(fast, 0))
            await asyncio.sleep(0)
        return found

    async def together() -> list[list[Tensor]]:
        return await asyncio.gather(outside(), *(inside(seed) for seed in range(5)), outside())

    with leaving_no_trace(model):
        first, *tasks, last = asyncio.run(together())
    for found, alone in zip(tasks, expected, strict=True):
        for one in found:
            torch.testing.assert_close(one, alone)
    for one in (*first, *last):
        torch.testing.assert_close(one, plain)


def test_compiled_calls_in_threads_see_their_own_context(compiled: tuple[nn.Module, nn.Module]) -> None:
    model, fast = compiled
    expected = []
    for seed in range(THREADS):
        with dcpp.forced_masks(model, given(model, seed)):
            expected.append(mean(model, 0))
            mean(fast, 0)
    wrong: list[int] = []

    def work(seed: int) -> None:
        with dcpp.forced_masks(model, given(model, seed)):
            for _ in range(30):
                if not torch.allclose(mean(fast, 0), expected[seed], atol=1e-6):
                    wrong.append(seed)

    with leaving_no_trace(model):
        in_threads([lambda seed=seed: work(seed) for seed in range(THREADS)])
    assert wrong == []


def test_compiled_calls_in_a_generators_context_are_right_or_refused(compiled: tuple[nn.Module, nn.Module]) -> None:
    model, full = compiled
    parts = torch.compile(model, backend="eager")
    expected = []
    for seed in range(2):
        with dcpp.forced_masks(model, given(model, seed)):
            expected.append(mean(model, 0))

    def generate(seed: int, call: nn.Module) -> Iterator[Tensor]:
        with dcpp.forced_masks(model, given(model, seed)):
            while True:
                yield mean(call, 0)

    first, second = generate(0, parts), generate(1, parts)  # type: ignore[arg-type]
    for _ in range(2):
        torch.testing.assert_close(next(first), expected[0])
        torch.testing.assert_close(next(second), expected[1])
    first.close()  # type: ignore[attr-defined]
    second.close()  # type: ignore[attr-defined]
    torch.compiler.reset()  # what was compiled in parts would serve
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a generator holds a context of dropconnectpp open"):
        next(generate(0, full))
    torch.testing.assert_close(mean(full, 0), mean(model, 0))
