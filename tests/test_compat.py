"""The private parts of torch that the package uses do what their wrappers say, in this torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils import cpp_extension

from dropconnectpp import _compat


def during_backward(ask: Any, **how: bool) -> list[Any]:
    """What a question is answered, asked as a gradient passes."""
    answers: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2.0
    y.register_hook(lambda gradient: answers.append(ask()))
    torch.autograd.grad(y.sum(), x, **how)
    return answers


def test_operations_of_the_graph_tell_shapes_and_axes() -> None:
    x = torch.randn(2, 3, 4, requires_grad=True) * 2.0
    mean, flat = x.mean((-1, 0)).grad_fn, x.view(2, 12).grad_fn
    assert _compat.saved_shape(mean) == (2, 3, 4)
    assert [axis % 3 for axis in _compat.saved_axes(mean)] == [2, 0]
    assert _compat.saved_axes(torch.cat([x, x], -1).grad_fn)[0] % 3 == 2
    assert _compat.shape_of(mean) == (3,)
    assert (_compat.saved_shape(flat), _compat.shape_of(flat)) == ((2, 3, 4), (2, 12))
    assert (_compat.saved_shape(x.grad_fn), _compat.saved_axes(x.grad_fn)) == ((), ())


# --------------------------------------------------------------------------------------- random numbers


def test_gamma_numbers_come_from_the_generator_and_have_their_distribution() -> None:
    shape = torch.tensor([0.3, 1.0, 4.0]).repeat_interleave(4000)
    first, again = (_compat.standard_gamma(shape, torch.Generator().manual_seed(7)) for _ in range(2))
    before = torch.get_rng_state()
    other = _compat.standard_gamma(shape, torch.Generator().manual_seed(8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())
    for alpha, numbers in zip((0.3, 1.0, 4.0), first.double().view(3, -1), strict=True):
        assert stats.kstest(numbers.numpy(), stats.gamma(alpha).cdf).pvalue > 1e-5


def test_gamma_numbers_without_a_generator_come_from_the_global_one() -> None:
    shape = torch.full((5,), 2.0)
    torch.manual_seed(3)
    first = _compat.standard_gamma(shape)
    torch.manual_seed(3)
    assert torch.equal(first, _compat.standard_gamma(shape))


# --------------------------------------------------------------------------------------- autograd


def test_a_backward_pass_says_whether_its_graph_is_kept() -> None:
    assert during_backward(_compat.graph_is_kept) == [False]
    assert during_backward(_compat.graph_is_kept, retain_graph=True) == [True]
    assert during_backward(_compat.graph_is_kept, create_graph=True) == [True]
    assert _compat.graph_is_kept()


def test_a_backward_pass_has_a_number_and_other_times_have_none() -> None:
    assert _compat.graph_task_id() == -1
    (first,) = during_backward(_compat.graph_task_id)
    (second,) = during_backward(_compat.graph_task_id)
    assert -1 < first < second
    assert _compat.graph_task_id() == -1


def test_a_callback_runs_once_after_all_gradients() -> None:
    events: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2.0
    z = y * 3.0
    x.register_post_accumulate_grad_hook(lambda leaf: events.append("leaf"))
    y.register_hook(lambda gradient: events.append("middle"))
    z.register_hook(lambda gradient: _compat.after_backward(lambda: events.append("after")))
    loss = z.sum()
    loss.backward(retain_graph=True)
    assert events == ["middle", "leaf", "after"]
    loss.backward()
    assert events == 2 * ["middle", "leaf", "after"]


def test_a_callback_outside_backward_is_refused() -> None:
    with pytest.raises(RuntimeError, match="during backward pass"):
        _compat.after_backward(lambda: None)


# ----------------------------------------------------------------------------- transforms and structures


def test_transforms_are_seen_while_they_run() -> None:
    answers: list[bool] = []

    def ask(x: Tensor) -> Tensor:
        answers.append(_compat.under_transform())
        return x.sum()

    ask(torch.ones(2))
    torch.func.vmap(ask)(torch.ones(3, 2))
    torch.func.grad(ask)(torch.ones(2))
    torch.func.jvp(ask, (torch.ones(2),), (torch.ones(2),))
    ask(torch.ones(2))
    assert answers == [False, True, True, True, False]


def test_leaves_of_a_structure_come_in_order() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    found = _compat.tree_leaves({"first": [a, (b, 5)], "second": c})
    assert [id(leaf) for leaf in found] == [id(a), id(b), id(5), id(c)]
    assert _compat.tree_leaves(a)[0] is a


# --------------------------------------------------------------------------------------- CUDA kernels


@pytest.mark.parametrize("given", [None, "/usr/local/cuda"])
def test_no_toolkit_is_needed_to_compile(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", given)
    homes: list[str | None] = []

    class Kernel:
        shared = -1

        def set_shared_memory_config(self, shared: int) -> None:
            self.shared = shared

    def compiled(source: str, name: str, nvcc_options: list[str]) -> Kernel:
        assert (source, name, nvcc_options) == ("source", "name", ["-DSIZE=3"])
        homes.append(cpp_extension.CUDA_HOME)
        return Kernel()

    monkeypatch.setattr(torch.cuda, "_compile_kernel", compiled)
    kernel: Any = _compat.compile_cuda_kernel("source", "name", ("-DSIZE=3",), shared=64)
    assert kernel.shared == 64
    assert homes == [given or str(Path(_compat.__file__).parent)]
    assert given == cpp_extension.CUDA_HOME


@pytest.mark.gpu
def test_a_kernel_is_compiled_and_runs_with_more_shared_memory_than_the_default() -> None:
    source = """extern "C" __global__ void reversed(const float* x, float* y, int count) {
        extern __shared__ float shared[];
        for (int i = threadIdx.x; i < count; i += blockDim.x) shared[i] = x[i];
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += blockDim.x) y[i] = FACTOR * shared[count - 1 - i];
    }"""
    count = 15_000  # 60 kB; 48 kB need no asking
    kernel = _compat.compile_cuda_kernel(source, "reversed", ["-DFACTOR=2.0f"], shared=4 * count)
    x = torch.arange(count, dtype=torch.float32, device="cuda")
    y = torch.empty_like(x)
    kernel(grid=(1, 1, 1), block=(256, 1, 1), args=[x, y, count], shared_mem=4 * count)
    assert torch.equal(y, 2.0 * x.flip(0))


# --------------------------------------------------------------------------------------- compiled modules


def test_a_compiled_module_gives_back_what_was_compiled() -> None:
    module = torch.nn.Linear(2, 2)
    compiled = torch.compile(module)
    assert _compat.compiled_from(compiled) is module
    assert _compat.compiled_from(module) is None
    assert f"{_compat.COMPILED}.weight" in compiled.state_dict()


# --------------------------------------------------------------------------------------- several processes


def test_a_data_parallel_forward_is_seen(tmp_path: Path) -> None:
    asked: list[bool] = []
    layer = torch.nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: asked.append(_compat.data_parallel_is_running()))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        torch.nn.parallel.DistributedDataParallel(layer)(torch.ones(1, 2))
    finally:
        torch.distributed.destroy_process_group()
    layer(torch.ones(1, 2))
    assert asked == [True, False]
