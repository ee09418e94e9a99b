"""One draw of every mask of a model, and the contexts that say which draw a pass uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dropconnectpp.errors import ArgumentError
from dropconnectpp.ops import gated_weight

if TYPE_CHECKING:
    from dropconnectpp.layers.base import MaskedLayer


@dataclass(frozen=True, eq=False)
class Gates:
    """What one layer uses in one pass.

    ``kind`` is "mean" (Eq. 19), "mask" (boolean masks), "noise" (uniform noise for relaxed gates),
    "example" (a mask per example, redrawn from ``seed`` and ``bias_seed`` whenever needed), "gaussian"
    (noise on the outputs, from ``seed`` too) or "average" (Eq. 18: the mean activation over ``count`` masks).
    ``relaxed`` asks for the estimator's training gates, ``mirrored`` marks the second arm of an
    antithetic pair.
    """

    kind: str
    weight: Tensor | None = None
    bias: Tensor | None = None
    seed: int | None = None
    bias_seed: int | None = None
    relaxed: bool = False
    mirrored: bool = False
    count: int = 1


MEAN = Gates("mean")

Assignment = dict["MaskedLayer", Gates]


class NoiseSource:
    """Uniform noise and seeds from one `torch.Generator`, or from torch's global one.

    A generator on another device than a layer's seeds one there. In a distributed run without a
    generator each rank mixes its number into torch's, so that ranks seeded alike still draw
    different masks, and gradient checkpointing, which rewinds torch's generator, draws them again.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator if generator is not None else _rank_generator()
        self._on_device: dict[torch.device, torch.Generator] = {}

    def for_device(self, device: torch.device) -> torch.Generator | None:
        if self.generator is None or self.generator.device.type == device.type:
            return self.generator
        if device not in self._on_device:
            self._on_device[device] = torch.Generator(device).manual_seed(self.seed())
        return self._on_device[device]

    def uniform(self, like: Tensor) -> Tensor:
        dtype = like.dtype if like.dtype == torch.float64 else torch.float32
        generator = self.for_device(like.device)
        if not transformed():
            return gated_weight.uniform(like.shape, dtype, like.device, generator)
        if generator is None:  # no generator argument at all: torch.compile cannot trace one
            return torch.rand(like.shape, device=like.device, dtype=dtype)
        return torch.rand(like.shape, device=like.device, dtype=dtype, generator=generator)

    def seed(self) -> int:
        device = self.generator.device if self.generator is not None else torch.device("cpu")
        bits = torch.randint(2**62, (), device=device, generator=self.generator)
        return int(bits.item())


def _rank_generator() -> torch.Generator | None:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    if distributed.get_world_size() == 1 or (transformed() and not torch.compiler.is_compiling()):
        return None  # also under torch.func, which has no way to a generator
    generator: torch.Generator = _seeded_generator(distributed.get_rank())
    return generator


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _seeded_generator(rank: int) -> torch.Generator:
    key = (int(torch.randint(2**62, ()).item()), rank)
    words = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))


def masked_layers(model: nn.Module) -> dict[str, MaskedLayer]:
    """Every DropConnect and DropConnect++ layer of a model, once each, by its qualified name."""
    from dropconnectpp.layers.base import MaskedLayer

    return {name: m for name, m in model.named_modules() if isinstance(m, MaskedLayer)}


class Sample:
    """The Z^(l) of Eq. (15): one draw of every mask, in one or two antithetic arms.

    Parameters that layers share are drawn once. With ``relaxed`` each layer draws the gates its
    estimator trains with, otherwise binary masks.
    """

    def __init__(self, layers: Sequence[MaskedLayer], source: NoiseSource, *, relaxed: bool, arms: int = 1) -> None:
        known: dict[Any, Any] = {}
        cursors = {id(c): c for layer in layers if (c := layer._forced) is not None}
        self.arms: list[Assignment] = []
        for arm in range(arms):
            for cursor in cursors.values():
                cursor.advance()
            self.arms.append({layer: _draw(layer, source, relaxed, arm, known) for layer in layers})


def _draw(layer: MaskedLayer, source: NoiseSource, relaxed: bool, arm: int, known: dict[Any, Any]) -> Gates:
    mirrored = arm == 1 and layer.antithetic
    forced = layer._forced
    if forced is not None:
        if mirrored:
            return forced.gates(layer)
        if layer not in known:  # a layer without a mirrored mask keeps the first arm's in the second
            known[layer] = forced.gates(layer)
        gates: Gates = known[layer]
        return gates
    kind = layer.gate_kind(relaxed)
    if kind in ("example", "gaussian"):
        seeds: dict[str, int] = {}
        for name in layer.synapse_names if kind == "example" else ("weight",):
            key = layer.tie(name)
            if key not in known:
                known[key] = source.seed()
            seeds[name] = known[key]
        return Gates(kind, seed=seeds["weight"], bias_seed=seeds.get("bias"), relaxed=relaxed, mirrored=mirrored)
    values: dict[str, Tensor | None] = {"weight": None, "bias": None}
    for name in layer.synapse_names:
        key = (layer.tie(name), arm if mirrored else 0)
        if key not in known:
            known[key] = _draw_tensor(layer, name, kind, source, mirrored, known)
        values[name] = known[key]
    return Gates(kind, values["weight"], values["bias"], relaxed=relaxed, mirrored=mirrored)


def fresh_gates(layer: MaskedLayer) -> Gates:
    """Gates for a training call outside every context: drawn for this call alone."""
    kind = layer.gate_kind(True)
    source = NoiseSource()
    if (kind == "example" and transformed()) or (kind == "gaussian" and source.generator is None):
        return Gates(kind, relaxed=True)  # no seed: noise straight from torch's generator
    return _draw(layer, source, True, 0, {})


def transformed() -> bool:
    """Whether torch.compile or a torch.func transform is watching: then only plain operations will do."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def _draw_tensor(
    layer: MaskedLayer, name: str, kind: str, source: NoiseSource, mirrored: bool, known: dict[Any, Any]
) -> Tensor:
    """Noise or mask of one parameter; an antithetic layer keeps its noise for the second arm."""
    if kind == "mask" and not layer.antithetic and not transformed():
        return layer.draw_mask(name, source)
    noise_key = (layer.tie(name), "noise")
    noise = known.get(noise_key) if mirrored else None
    if noise is None:
        noise = source.uniform(getattr(layer, name))
    if layer.antithetic and not mirrored:
        known[noise_key] = noise
    if kind == "noise":
        return noise
    return layer.mask_from_noise(name, noise, mirrored)


# ------------------------------------------------------------------------------------- contexts


@contextmanager
def running(assignment: Assignment) -> Iterator[None]:
    """Make each layer use the gates given for it, within the context."""
    before = {layer: layer._gates for layer in assignment}
    _assign(assignment)
    try:
        yield
    finally:
        for layer, gates in before.items():
            layer._gates = gates


def _assign(assignment: Assignment) -> None:
    for layer, gates in assignment.items():
        layer._gates = gates


def replay_in_backward(outputs: object, assignment: Assignment) -> None:
    """Have a pass's gates in place again while its gradient is computed.

    Gradient checkpointing runs layers anew inside backward, when the context is long closed and
    later samples have been drawn; the recomputed masks must be those of this pass. Autograd works
    through later passes first, so setting them as the gradient enters the pass's output suffices.
    """

    def clear() -> None:
        for layer in assignment:
            layer._replayed = None

    def enter(gradient: Tensor) -> None:
        for layer, gates in assignment.items():
            layer._replayed = gates
        torch.autograd.Variable._execution_engine.queue_callback(clear)

    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(enter)


@contextmanager
def sampling(model: nn.Module, generator: torch.Generator | None = None) -> Iterator[None]:
    """Draw masks in eval mode too: each call of ``model`` inside draws anew, from ``generator``.

    A layer called twice within one call of ``model`` uses one mask. Checkpointed blocks inside the
    model are recomputed with theirs; do not wrap the call of ``model`` itself in a reentrant checkpoint.

    >>> layer = dropconnectpp.DropConnectPPLinear(8, 1).eval()
    >>> with sampling(layer, torch.Generator().manual_seed(0)):
    ...     a, b = layer(torch.ones(1, 8)), layer(torch.ones(1, 8))
    >>> bool((a == b).all())
    False
    """
    layers = list(masked_layers(model).values())
    source = NoiseSource(generator)
    current: list[Assignment] = []
    unused = True

    def draw() -> None:
        current[:] = Sample(layers, source, relaxed=model.training).arms
        _assign(current[0])

    def begin(*_: object) -> None:
        nonlocal unused
        if not unused:  # the first call takes the draw made on entering
            draw()
        unused = False

    def finish(module: nn.Module, inputs: object, outputs: object) -> None:
        replay_in_backward(outputs, current[0])

    with running(dict.fromkeys(layers, MEAN)):
        draw()
        before = model.register_forward_pre_hook(begin)
        after = model.register_forward_hook(finish)
        try:
            yield
        finally:
            before.remove()
            after.remove()


class ForcedMasks:
    """Masks given by the user, one mapping per pass in turn; shared by the layers of one model."""

    def __init__(self, passes: Sequence[Mapping[str, Tensor]], names: dict[MaskedLayer, str]) -> None:
        self.passes = passes
        self.names = names
        self.position = -1

    def advance(self) -> None:
        self.position += 1

    def gates(self, layer: MaskedLayer) -> Gates:
        masks = self.passes[max(self.position, 0) % len(self.passes)]
        prefix = self.names[layer]
        found: dict[str, Tensor | None] = {"weight": None, "bias": None}
        for name in layer.synapse_names:
            mask, kept = masks[f"{prefix}{name}"], layer.kept(name)
            found[name] = mask if kept is None else mask & kept
        return Gates("mask", found["weight"], found["bias"])


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
    chosen = {layer: f"{name}." if name else "" for name, layer in layers.items() if name in named}
    cursor = ForcedMasks(checked, chosen)
    before = {layer: layer._forced for layer in chosen}
    for layer in chosen:
        layer._forced = cursor
    try:
        yield
    finally:
        for layer, previous in before.items():
            layer._forced = previous


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
    return checked
