"""Which gates each layer uses in a pass: values that live in a context, never on a module.

Threads, asyncio tasks and nested contexts cannot meet: each has its own stack of assignments. torch.compile cannot
trace `ContextVar.get`, but it looks an attribute that is defined in C up anew at each call: the stack is one.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import CO_ASYNC_GENERATOR, CO_GENERATOR
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dropconnectpp import _compat
from dropconnectpp.ops.drawn import Draw
from dropconnectpp.ops.gpu_gates import Tally

# ------------------------------------------------------------------------------------------------ the gates


@dataclass(frozen=True)
class MeanGates:
    """Every gate at its mean, pi~: Eq. (19)."""


@dataclass(frozen=True, eq=False)
class ForcedGates:
    """Masks that the user gives, one for the batch or, with an axis more, one for each example."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class DrawnGates:
    """Gates that a draw defines; ``streams`` numbers the layer's parameters within it."""

    draw: Draw
    streams: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class BinaryGates(DrawnGates):
    """Masks; ``mirrored`` marks the second arm of an antithetic pair."""

    each_example: bool = False
    mirrored: bool = False
    tally: Tally | None = None
    """What the first pass works out beside the masks, where a kernel does both."""


@dataclass(frozen=True, eq=False)
class RelaxedGates(DrawnGates):
    """Binary concrete gates, between 0 and 1."""

    temperature: float
    each_example: bool = False


@dataclass(frozen=True, eq=False)
class GaussianGates(DrawnGates):
    """Gaussian noise on the outputs, with the moments that masks would give them."""


@dataclass(frozen=True, eq=False)
class AverageGates:
    """Eq. (18): the layer's activation, averaged over the gates of one draw after another."""

    drawn: tuple[Gates, ...]


Gates = MeanGates | ForcedGates | BinaryGates | RelaxedGates | GaussianGates | AverageGates


class Assignment(Protocol):
    """Which gates a pass gives each layer: a dictionary, or what answers like one."""

    def get(self, layer: nn.Module, /) -> Gates | None:
        """The layer's gates; None if the pass has none for it."""


class Watched:
    """An assignment that notes which layers ask it for their gates; not what compiled code asks."""

    def __init__(self, gates: Mapping[nn.Module, Gates]) -> None:
        self.gates = gates
        self.asked: set[nn.Module] = set()

    def get(self, layer: nn.Module, /) -> Gates | None:
        """The layer's gates; None if there are none for it."""
        found = self.gates.get(layer)
        if found is not None and not torch.compiler.is_compiling():
            self.asked.add(layer)
        return found


MEAN = MeanGates()

# ------------------------------------------------------------------------------------------- the context


class Use:
    """An assignment in use: what a context puts on the stack, and closes.

    A task begun inside a context has a copy of its stack, and a generator may be closed by another thread than the one
    that ran it: where the stack can no longer be put right, a closed use is passed over.
    """

    def __init__(self, assignment: Assignment, owner: Use | None = None, generator: int | None = None) -> None:
        self.assignment = assignment
        self.owner = owner
        """For one call of a model inside a context: that context's use."""
        self.generator = generator
        """The frame, by its id, of the generator that has the context open in its body."""
        self.in_generator = generator is not None
        self.closed = False

    @property
    def open(self) -> bool:
        return not self.closed and (self.owner is None or self.owner.open)


_stack: ContextVar[tuple[Use, ...]] = ContextVar("dropconnectpp_passes", default=())


class _Context:
    """The context variable as an attribute, which is the object itself where the variable was never set."""

    stack = property(_stack.get)


class _Traced(threading.local):
    """What compiled code began and has not ended: it cannot set a context variable."""

    def __init__(self) -> None:
        self.stack: tuple[Use, ...] = ()


_context: Any = _Context()
_traced = _Traced()


def uses() -> list[Use]:
    """The uses that are open in this context, innermost last.

    A generator's contexts belong to its body. While it is left half-way they count as the outermost, since Python
    leaves them to whoever called it; the caller's own, and those of a generator that is running, come before them.
    """
    found = _open()
    for use in found:
        if use.in_generator:
            return _ranked(found)  # type: ignore[no-any-return]
    return found


# A compiled graph ends here, and a full one cannot be: Python's frames alone say which generator is running.
@torch.compiler.disable(reason="a generator holds a context of dropconnectpp open")  # type: ignore[untyped-decorator]
def _ranked(found: list[Use]) -> list[Use]:
    depths = {id(frame): -place for place, frame in enumerate(_frames())}
    root = min(depths.values()) - 1
    return sorted(found, key=lambda use: root if use.generator is None else depths.get(use.generator, root - 1))


def _open() -> list[Use]:
    """The uses in the order in which they began, calls behind the contexts that own them."""
    if not torch.compiler.is_compiling():
        return [use for use in _stack.get() if use.open]
    stack = [] if _context.stack is _context else list(_context.stack)
    for use in _traced.stack:
        stack = _with(stack, use)
    return [use for use in stack if use.open]


def _with(stack: list[Use], use: Use) -> list[Use]:
    owner = use.owner
    places = [place for place, other in enumerate(stack) if owner is not None and owner in (other, other.owner)]
    place = places[-1] + 1 if places else len(stack)
    return [*stack[:place], use, *stack[place:]]


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _generator() -> int | None:
    """The generator whose body is running; one that contextlib makes a context of stands for the body of a `with`."""
    for frame in _frames():
        generates = frame.f_code.co_flags & (CO_GENERATOR | CO_ASYNC_GENERATOR) and frame.f_code.co_filename != __file__
        caller = frame.f_back
        if generates and (caller is None or caller.f_code.co_filename != contextlib.__file__):
            return id(frame)
    return None


def begin(assignment: Assignment, owner: Use | None = None) -> Use:
    """Use the gates of an assignment until the use is ended; a call ranks as the context that owns it."""
    use = Use(assignment, owner, None if owner is None else owner.generator)
    if torch.compiler.is_compiling():
        _traced.stack = (*_traced.stack, use)
        return use
    stack = _open()
    if owner is None and any(other.in_generator for other in stack):
        use = Use(assignment, None, _generator())
    _stack.set(tuple(_with(stack, use)))
    return use


def end(use: Use) -> None:
    """Stop using an assignment, wherever in the stack it is: contexts may close in any order."""
    use.closed = True
    if torch.compiler.is_compiling():
        _traced.stack = tuple(other for other in _traced.stack if other is not use)
    else:
        _stack.set(tuple(_open()))


@contextmanager
def running(assignment: Assignment, *, users: bool = False) -> Iterator[Use]:
    """Make each layer use the gates given for it, within the context; ``users`` says that its body is the user's."""
    use = begin(assignment)
    if users and not torch.compiler.is_compiling():
        use.generator = _generator()
        use.in_generator = use.generator is not None
    try:
        yield use
    finally:
        end(use)


def innermost_call(owner: Use) -> Use | None:
    """The call under way inside the context of ``owner`` in this thread or task, the last one begun."""
    for use in reversed(uses()):
        if use.owner is owner:
            return use
    return None


def current() -> list[Assignment]:
    """The assignments in use in this context, innermost last."""
    return [use.assignment for use in uses()]


def assigned(layer: nn.Module) -> Gates | None:
    """The gates that the innermost assignment has for a layer."""
    if not torch.compiler.is_compiling():
        stack = _stack.get()
        if len(stack) == 1 and stack[0].owner is None and not stack[0].in_generator:  # a training step, as a rule
            return None if stack[0].closed else stack[0].assignment.get(layer)
    for use in reversed(uses()):
        gates = use.assignment.get(layer)
        if gates is not None:
            return gates
    return None


# ------------------------------------------------------------------------------ recomputation in backward

_MOST_REPLAYS = 256
"""Backward passes that failed leave theirs behind; more than this many are forgotten, oldest first."""

_replays: dict[int, Assignment] = {}


class _Latest(threading.local):
    assignment: Assignment | None = None


_latest = _Latest()


def replay_in_backward(outputs: object, assignment: Assignment) -> None:
    """Have a pass's gates at hand again while its gradient is computed.

    Gradient checkpointing runs layers anew inside backward, when the context is long closed and later samples have
    been drawn; the recomputed masks must be those of this pass. Autograd works through later passes first, so noting
    them as the gradient enters the pass's output suffices.
    """
    if torch.compiler.is_compiling():  # recomputation is part of the graph there
        return

    def enter(gradient: Tensor) -> None:
        task = _compat.graph_task_id()
        if task not in _replays:
            while len(_replays) >= _MOST_REPLAYS:
                _replays.pop(next(iter(_replays)), None)
            _compat.after_backward(lambda: _forget(task))
        _replays[task] = assignment

    for leaf in (outputs,) if isinstance(outputs, Tensor) else _compat.tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(enter)


def _forget(task: int) -> None:
    _replays.pop(task, None)


def replayed(layer: nn.Module) -> Gates | None:
    """Inside a backward pass, the gates that the pass under way used for a layer."""
    if torch.compiler.is_compiling():
        return None
    task = _compat.graph_task_id()
    if task == -1:
        return None
    assignment = _replays.get(task)
    if assignment is None:  # a backward pass within a backward pass: reentrant checkpointing
        assignment = _latest.assignment if _replays else None
    else:
        _latest.assignment = assignment
    return None if assignment is None else assignment.get(layer)
