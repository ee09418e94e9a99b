"""Drawing every gate of a model at once, and the contexts that say which gates its passes use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Lock
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dropconnectpp.errors import ArgumentError, check_choice
from dropconnectpp.layers.base import MaskedLayer, masked_layers
from dropconnectpp.layers.passes import (
    ForcedGates,
    Gates,
    Use,
    begin,
    current,
    end,
    innermost_call,
    replay_in_backward,
    running,
    uses,
)
from dropconnectpp.layers.seeds import fresh_draws
from dropconnectpp.ops.drawn import Draw


class Sample:
    """The Z^(l) of Eq. (15): one draw of every mask, in one or two antithetic arms.

    Parameters that layers share have one stream. With ``relaxed`` each layer has the gates its estimator trains with,
    otherwise binary masks.
    """

    def __init__(self, layers: Sequence[MaskedLayer], draw: Draw, *, relaxed: bool, arms: int = 1) -> None:
        self.draw = draw
        self.arms: list[dict[nn.Module, Gates]] = []
        streams: dict[Any, int] = {}
        for arm in range(arms):
            forced = _forced(layers)
            self.arms.append({layer: self._gates(layer, relaxed, arm, streams, forced) for layer in layers})

    def _gates(
        self,
        layer: MaskedLayer,
        relaxed: bool,
        arm: int,
        streams: dict[Any, int],
        forced: Mapping[nn.Module, Gates],
    ) -> Gates:
        mirrored = arm == 1 and layer.antithetic
        if layer in forced:
            # A layer without a mirrored mask keeps the first arm's in the second.
            return self.arms[0][layer] if arm and not mirrored else forced[layer]
        numbers = {name: streams.setdefault(layer.tie(name), len(streams)) for name in layer.synapse_names}
        return layer.gates(self.draw, numbers, relaxed=relaxed, mirrored=mirrored)


def draw_samples(
    layers: Sequence[MaskedLayer],
    count: int,
    generator: torch.Generator | None = None,
    *,
    relaxed: bool,
    arms: int = 1,
) -> list[Sample]:
    """``count`` samples with seeds from a generator, or from torch's own."""
    device = layers[0].weight.device if layers else torch.device("cpu")
    draws = fresh_draws(count, device, generator)
    return [Sample(layers, draw, relaxed=relaxed, arms=arms) for draw in draws]


# ------------------------------------------------------------------------------------- contexts

_registering = Lock()
"""torch numbers hooks by a counter that two threads may read at once."""
_lasting: WeakKeyDictionary[Use, Callable[[], AbstractContextManager[None]]] = WeakKeyDictionary()
"""How each `sampling` context makes one draw last for several calls."""

Lifetime = Literal["generation", "call", "context"]
"""How long a draw of `sampling` lasts."""


@contextmanager
def sampling(
    model: nn.Module, generator: torch.Generator | None = None, *, per: Lifetime = "generation"
) -> Iterator[None]:
    """Draw masks in eval mode too, from ``generator``.

    Each call of ``model`` inside draws anew, and a converted Hugging Face model's `generate` draws once for the whole
    text: one network writes all of it. With ``per="call"`` each call inside `generate` draws too, a network for every
    token; ``per="context"`` draws once for all that happens inside.

    A layer called twice within one call of ``model`` uses one mask. Checkpointed blocks inside the
    model are recomputed with theirs; do not wrap the call of ``model`` itself in a reentrant checkpoint.

    >>> layer = dropconnectpp.DropConnectPPLinear(8, 1).eval()
    >>> with sampling(layer, torch.Generator().manual_seed(0)):
    ...     a, b = layer(torch.ones(1, 8)), layer(torch.ones(1, 8))
    >>> bool((a == b).all())
    False
    """
    check_choice("per", per, get_args(Lifetime))
    layers = list(masked_layers(model).values())

    def draw() -> dict[nn.Module, Gates]:
        return draw_samples(layers, 1, generator, relaxed=model.training)[0].arms[0]

    outer = draw()  # for layers that are called by themselves
    with running(outer, users=True) as owner:
        if per == "context":
            yield
            return
        calls = _Calls(owner, layers, outer, draw)
        with _registering:
            before = model.register_forward_pre_hook(lambda *_: calls.start())
            after = model.register_forward_hook(lambda *passed: calls.finish(passed[-1]), always_call=True)
        if per == "generation":
            _lasting[owner] = calls.last
        try:
            yield
        finally:
            with _registering:
                before.remove()
                after.remove()


class _Calls:
    """The draws of one `sampling` context, call by call."""

    def __init__(
        self,
        owner: Use,
        layers: Sequence[MaskedLayer],
        outer: dict[nn.Module, Gates],
        draw: Callable[[], dict[nn.Module, Gates]],
    ) -> None:
        self.owner, self.layers, self.outer, self.draw = owner, layers, outer, draw
        self.unused = True
        self.long: set[Use] = set()
        """The draws that outlast the calls inside them."""

    def start(self) -> None:
        """A call begins."""
        if innermost_call(self.owner) in self.long or not any(_serves(self.owner, layer) for layer in self.layers):
            return
        # The first call takes the draw made on entering, unless masks were given since.
        call = self.outer if self.unused and uses()[-1] is self.owner else self.draw()
        self.unused = False
        begin(call, self.owner)

    def finish(self, outputs: object) -> None:
        """A call ends."""
        call = innermost_call(self.owner)
        if call is not None:
            if call not in self.long:
                end(call)
            replay_in_backward(outputs, call.assignment)

    @contextmanager
    def last(self) -> Iterator[None]:
        """One draw for all calls inside."""
        before = innermost_call(self.owner)
        self.start()
        call = innermost_call(self.owner)
        if call is None or call is before:
            yield
            return
        self.long.add(call)
        try:
            yield
        finally:
            self.long.discard(call)
            end(call)


@contextmanager
def one_draw() -> Iterator[None]:
    """Have the `sampling` contexts around this draw once for all calls inside, where they allow it."""
    with ExitStack() as stack:
        for use in uses():
            if use in _lasting:
                stack.enter_context(_lasting[use]())
        yield


def _serves(owner: Use, layer: nn.Module) -> bool:
    """Whether a layer has its gates from this context: whether it is the innermost that has any, masks given aside."""
    for use in reversed(uses()):
        if not isinstance(use.assignment, ForcedMasks) and use.assignment.get(layer) is not None:
            return use is owner or use.owner is owner
    return False


class ForcedMasks:
    """Masks given by the user, one mapping per pass in turn: an assignment that knows which pass it is."""

    def __init__(self, passes: Sequence[Mapping[str, Tensor]], prefixes: Mapping[nn.Module, str]) -> None:
        self.passes = passes
        self.prefixes = prefixes
        self.position = -1

    def advance(self) -> None:
        """Go on to the masks of the next pass."""
        self.position += 1

    def get(self, layer: nn.Module) -> ForcedGates | None:
        """The masks of this pass for a layer, pruned synapses off; None for a layer that was not named."""
        prefix = self.prefixes.get(layer)
        if prefix is None:
            return None
        assert isinstance(layer, MaskedLayer)
        masks = self.passes[max(self.position, 0) % len(self.passes)]
        found: dict[str, Tensor | None] = {"weight": None, "bias": None}
        for name in layer.synapse_names:
            mask, kept = masks[f"{prefix}{name}"], layer.kept(name)
            found[name] = mask if kept is None else mask & kept
        assert found["weight"] is not None
        return ForcedGates(found["weight"], found["bias"])


def _forced(layers: Sequence[MaskedLayer]) -> dict[nn.Module, Gates]:
    """The next pass's gates of the layers whose masks the user gives."""
    found: dict[nn.Module, Gates] = {}
    for masks in reversed([a for a in current() if isinstance(a, ForcedMasks)]):
        mine = [layer for layer in layers if layer in masks.prefixes and layer not in found]
        if mine:
            masks.advance()
        found |= {layer: gates for layer in mine if (gates := masks.get(layer)) is not None}
    return found


@contextmanager
def forced_masks(model: nn.Module, masks: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]) -> Iterator[None]:
    """Run with the masks given, in train and eval mode, alone or under an ELBO or `predict`.

    ``masks`` maps parameter names ("fc.weight", "fc.bias") to 0/1 tensors of the parameter's shape,
    or (B, *shape) where the layer draws one mask per example. Name all of a layer's synapses;
    layers that are not named go on as usual. A sequence of mappings is used up in turn, one per
    sample (two per sample with `disarm`), and starts again at its end.

    >>> layer = dropconnectpp.DropConnectPPLinear(2, 1, bias=False)
    >>> with torch.no_grad(), forced_masks(layer, {"weight": torch.tensor([[1, 0]])}):
    ...     bool(layer(torch.eye(2))[1] == 0)
    True
    """
    layers = masked_layers(model)
    passes = [masks] if isinstance(masks, Mapping) else list(masks)
    if not passes:
        raise ArgumentError("forced_masks needs at least one mapping of masks, got an empty sequence.")
    checked = [_check_masks(layers, mapping) for mapping in passes]
    if any(mapping.keys() != checked[0].keys() for mapping in checked):
        raise ArgumentError("forced_masks: every mapping of a sequence must name the same parameters.")
    named = {key.rpartition(".")[0] for key in checked[0]}
    prefixes: dict[nn.Module, str] = {
        layer: f"{name}." if name else "" for name, layer in layers.items() if name in named
    }
    with running(ForcedMasks(checked, prefixes), users=True):
        yield


def _check_masks(layers: Mapping[str, MaskedLayer], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    checked: dict[str, Tensor] = {}
    for key, mask in masks.items():
        owner, _, name = key.rpartition(".")
        if owner not in layers or name not in layers[owner].synapse_names:
            known = [f"{n}.{s}".lstrip(".") for n, m in layers.items() for s in m.synapse_names]
            raise ArgumentError(f"forced_masks: no masked parameter {key!r}. There are: {', '.join(known)}.")
        parameter = getattr(layers[owner], name)
        per_example = layers[owner].mask == "example" and mask.shape[1:] == parameter.shape
        if mask.shape != parameter.shape and not per_example:
            raise ArgumentError(
                f"forced_masks: the mask of {key!r} must have shape {tuple(parameter.shape)}"
                f"{' with a batch axis before it' if layers[owner].mask == 'example' else ''}, "
                f"got {tuple(mask.shape)}."
            )
        checked[key] = mask.to(device=parameter.device, dtype=torch.bool)
    for owner in {key.rpartition(".")[0] for key in checked}:
        prefix = f"{owner}." if owner else ""
        missing = [f"{prefix}{s}" for s in layers[owner].synapse_names if f"{prefix}{s}" not in checked]
        if missing:
            raise ArgumentError(f"forced_masks: {', '.join(missing)} missing. Give every mask of a layer.")
        batched = {
            checked[prefix + s].shape[: checked[prefix + s].ndim - getattr(layers[owner], s).ndim]
            for s in layers[owner].synapse_names
        }
        if len(batched) > 1:
            raise ArgumentError(
                f"forced_masks: the masks of {prefix}weight and {prefix}bias must have one batch axis or none, "
                f"got {tuple(checked[prefix + 'weight'].shape)} and {tuple(checked[prefix + 'bias'].shape)}."
            )
        fault = layers[owner].mask_fault({s: checked[prefix + s] for s in layers[owner].synapse_names})
        if fault is not None:
            raise ArgumentError(f"forced_masks: {owner or 'the model'} with {fault}: its mask must be the same there.")
    return checked
