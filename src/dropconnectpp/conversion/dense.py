"""`to_dense`: an ordinary model again, and the state of the plain model underneath."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropconnectpp.conversion.hosting import without
from dropconnectpp.conversion.swapping import copied, swap
from dropconnectpp.errors import ConversionError, check_choice
from dropconnectpp.layers.base import MaskedLayer, masked_layers
from dropconnectpp.layers.dropconnect import DropConnectLayer
from dropconnectpp.layers.dropconnectpp import PRUNED, DropConnectPPLayer
from dropconnectpp.layers.parameter import ParameterGates
from dropconnectpp.layers.seeds import fresh_draws
from dropconnectpp.layers.sparse import SparseLinear
from dropconnectpp.ops.drawn import Draw


@torch.no_grad()
def to_dense(
    model: nn.Module, mode: str = "mean", *, generator: torch.Generator | None = None, inplace: bool = False
) -> nn.Module:
    """An ordinary model of plain `nn` layers, for deployment: as fast as any.

    ``mode`` says what becomes of the gates: "mean" folds pi~ W, Eq. (19); "map" keeps the synapses
    with pi~ >= 1/2 as they are and drops the others; "sample" folds one draw of the masks. Pruned
    synapses become zeros. A layer with an activation becomes nn.Sequential(layer, activation); what `to_sparse`
    made becomes an ordinary layer again.

    >>> to_dense(torch.nn.Sequential(dropconnectpp.DropConnectPPLinear(8, 2)))
    Sequential(
      (0): Linear(in_features=8, out_features=2, bias=True)
    )
    """
    check_choice("mode", mode, ("mean", "map", "sample"))
    model = model if inplace else copied(model)
    draw: Draw | None = None
    streams: dict[Any, int] = {}
    folded: dict[Any, nn.Parameter] = {}
    values: dict[MaskedLayer, dict[str, nn.Parameter]] = {}
    for name, layer in masked_layers(model).items():
        if mode == "mean" and isinstance(layer, DropConnectLayer) and layer.evaluation == "gaussian":
            raise ConversionError(
                f"to_dense: {name or 'the model'} evaluates by Gaussian moment matching, which no plain layer does. "
                "Set its evaluation to 'mean' first, or keep the layer."
            )
        values[layer] = {}
        for parameter in layer.synapse_names:
            key = (layer.tie(parameter), id(getattr(layer, parameter)))
            if key not in folded:
                if draw is None and mode == "sample":
                    draw = fresh_draws(1, layer.weight.device, generator)[0]
                stream = streams.setdefault(layer.tie(parameter), len(streams))
                folded[key] = nn.Parameter(
                    _fold(layer, parameter, mode, draw, stream), requires_grad=getattr(layer, parameter).requires_grad
                )
            values[layer][parameter] = folded[key]
    sparse: dict[nn.Module, nn.Module] = {m: m.dense() for m in model.modules() if isinstance(m, SparseLinear)}
    dense = swap(model, without_gates(values) | sparse)
    _untie(dense)
    return dense


def _untie(model: nn.Module) -> None:
    """Have a Hugging Face model know that its head has weights of its own now, so that nobody ties them again."""
    heads = [getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings")]
    config = getattr(model, "config", None)
    if not all(callable(head) for head in heads) or not getattr(config, "tie_word_embeddings", False):
        return
    weights = [getattr(head(), "weight", None) for head in heads if head is not None]
    if None not in weights and weights[0] is not weights[1]:
        model.config = copy.deepcopy(config)  # type: ignore[assignment]
        model.config.tie_word_embeddings = False  # type: ignore[union-attr]


def without_gates(values: Mapping[MaskedLayer, Mapping[str, nn.Parameter]]) -> dict[nn.Module, nn.Module]:
    """The plain modules in the place of layers with gates, with these parameters."""
    found: dict[nn.Module, nn.Module] = {}
    hosts: dict[nn.Module, dict[str, nn.Parameter | None]] = {}
    for layer, given in values.items():
        if isinstance(layer, ParameterGates):
            hosts.setdefault(layer.host, {})[layer.parameter_name] = given["weight"]
        else:
            found[layer] = plain_layer(layer, given)
    return found | {host: without(host, given) for host, given in hosts.items()}


def plain_layer(layer: MaskedLayer, values: Mapping[str, nn.Parameter]) -> nn.Module:
    """The `nn` layer of a masked one with the parameters given, and its activation behind it."""
    plain = nn.utils.skip_init(layer.plain_type, **layer.arguments(), device=layer.weight.device)
    for name, value in values.items():
        plain.register_parameter(name, value)
    plain.train(layer.training)
    activation = as_module(layer.activation)
    return plain if activation is None else nn.Sequential(plain, activation).train(layer.training)


def _fold(layer: MaskedLayer, name: str, mode: str, draw: Draw | None, stream: int) -> Tensor:
    value: Tensor = getattr(layer, name).detach()
    # + 0.0 makes zeros of -0.0, which a negative weight that is off would be: one value packs better than two.
    if mode == "mean":
        return (layer.keep_probability(name) * value).to(value.dtype) + 0.0
    if mode == "map":
        return value * (layer.keep_probability(name) >= 0.5) + 0.0
    assert draw is not None
    return value * layer.mask_of(name, draw, stream) + 0.0


_ACTIVATION_MODULES: dict[Any, type[nn.Module]] = {
    F.relu: nn.ReLU,
    torch.relu: nn.ReLU,
    torch.tanh: nn.Tanh,
    F.tanh: nn.Tanh,
    torch.sigmoid: nn.Sigmoid,
    F.sigmoid: nn.Sigmoid,
    F.gelu: nn.GELU,
    F.silu: nn.SiLU,
    F.elu: nn.ELU,
}


def as_module(activation: Any, missing_ok: bool = False) -> nn.Module | None:
    """An activation as an `nn` module: a module itself, or the one that stands for a known function."""
    if activation is None or isinstance(activation, nn.Module):
        return activation
    if activation in _ACTIVATION_MODULES:
        return _ACTIVATION_MODULES[activation]()
    if missing_ok:
        return None
    raise ConversionError(
        f"to_dense: no nn module is known for the activation {activation!r}. "
        "Give the layer a module, such as nn.ReLU()."
    )


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state of the plain model underneath: weights W as they are, without posterior and pruning.

    It loads with strict=True into the model that was converted.
    """
    ours = {
        f"{name}.{key}" if name else key for name, layer in masked_layers(model).items() for key in _own_keys(layer)
    }
    return {key: value for key, value in model.state_dict().items() if key not in ours}


def _own_keys(layer: MaskedLayer) -> list[str]:
    posterior = layer.posterior_names if isinstance(layer, DropConnectPPLayer) else []
    return [*posterior, "weight_kept", "bias_kept", PRUNED]
