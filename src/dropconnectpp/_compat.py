"""Every private part of torch that this package uses, in one file: a new torch breaks this one and no other.

Each function says what public thing is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree

# --------------------------------------------------------------------------------------- random numbers


def standard_gamma(alpha: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Gamma(alpha, 1) numbers from a generator; `torch.distributions.Gamma` draws from the global one alone."""
    return torch._standard_gamma(alpha, generator=generator)


# --------------------------------------------------------------------------------------- autograd


def graph_is_kept() -> bool:
    """Whether the backward pass under way was asked for with ``retain_graph=True``; no public call says so.

    Outside a backward pass the answer is True: nothing may be overwritten.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def graph_task_id() -> int:
    """The number of the backward pass under way on this thread, or -1; no public call says whether one is."""
    return int(torch._C._current_graph_task_id())


def after_backward(callback: Callable[[], None]) -> None:
    """Call this once when the backward pass under way is over; public hooks belong to one tensor or node each.

    Raises RuntimeError outside a backward pass.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def shape_of(operation: Any) -> tuple[int, ...]:
    """The shape of what an operation of autograd's graph made; nothing public says it."""
    return tuple(int(size) for size in operation._input_metadata[0].shape)


def saved_shape(operation: Any) -> tuple[int, ...]:
    """The shape of what an operation read, where it remembers it; () where not."""
    return tuple(int(size) for size in getattr(operation, "_saved_self_sym_sizes", ()))


def saved_axes(operation: Any) -> tuple[int, ...]:
    """The axes that an operation acted on, where it remembers them; autograd has negative ones as unsigned numbers."""
    given = getattr(operation, "_saved_dim", ())
    axes = tuple(given) if isinstance(given, tuple | list) else (given,)
    return tuple(axis - 2**64 if axis >= 2**63 else axis for axis in axes)


# ----------------------------------------------------------------------------- transforms and structures


def under_transform() -> bool:
    """Whether a `torch.func` transform, such as vmap or grad, is tracing this code; no public call says so."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def tree_leaves(tree: object) -> list[Any]:
    """What lists, tuples, dicts and registered containers hold, in order; torch has no public module for trees."""
    return _pytree.tree_leaves(tree)


# --------------------------------------------------------------------------------------- compiled modules

COMPILED = "_orig_mod"
"""What `torch.compile` calls a module inside the one it returns: a part of every name in its state."""


def compiled_from(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module that `torch.compile` was given, or None for one it did not return; no public call says so."""
    inner = module._modules.get(COMPILED)
    return inner if type(module).__name__ == "OptimizedModule" else None


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of a module run compiled code, by `torch.compile` or `Module.compile`; no public call says so."""
    impl = getattr(module, "_compiled_call_impl", None)
    return (
        compiled_from(module) is not None or impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


# --------------------------------------------------------------------------------------- several processes


def data_parallel_is_running() -> bool:
    """Whether this code runs inside a forward of `DistributedDataParallel`; no public call says so."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None


# --------------------------------------------------------------------------------------- CUDA kernels


class CudaKernel(Protocol):
    """A compiled kernel, started on the current stream."""

    def __call__(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], args: list[Any], shared_mem: int
    ) -> None: ...


def compile_cuda_kernel(source: str, name: str, options: Sequence[str] = (), shared: int = 0) -> CudaKernel:
    """A kernel of CUDA C++ for the current device, with ``shared`` bytes of shared memory at most.

    Public torch compiles CUDA only by nvcc, which needs a toolkit; this uses the compiler that torch brings along.
    """
    with _without_toolkit():
        kernel = torch.cuda._compile_kernel(source, name, nvcc_options=list(options))
    kernel.set_shared_memory_config(shared)
    compiled: CudaKernel = kernel
    return compiled


@contextmanager
def _without_toolkit() -> Iterator[None]:
    """torch looks for a CUDA toolkit's headers and fails without one. Sources here include none: any folder does."""
    from torch.utils import cpp_extension  # needs setuptools, which a machine may lack

    before = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = before or str(Path(__file__).parent)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = before
