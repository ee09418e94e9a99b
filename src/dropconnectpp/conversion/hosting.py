"""Modules that read gated values in the place of their own parameters, and otherwise stay what they are.

A host is the module itself in a class of its own: a subclass in which each gated parameter is a property. Whoever reads
it, the module's own forward or its owner's, gets the parameter under the gates of the pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from dropconnectpp.errors import ConversionError
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer
from dropconnectpp.layers.parameter import PARAMETER_GATES, ParameterGates

CONNECTIONS = "connections"
"""Where a host has its gates: `lstm.connections.weight_hh_l0`."""
RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
DEFAULT: tuple[type[nn.Module], ...] = (
    *RECURRENT,
    nn.LSTMCell,
    nn.GRUCell,
    nn.RNNCell,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Bilinear,
    nn.MultiheadAttention,
)
"""What is converted unless asked otherwise."""
ON_REQUEST: tuple[type[nn.Module], ...] = (nn.Embedding, nn.EmbeddingBag)
"""What is converted where it is named, or its type is: a table's rows are no connections."""


class Connections(nn.Module):
    """The gates of a module's parameters, by their names."""


class Host:
    """What the classes of hosts have in common; see `host_class`."""

    plain_type: type[nn.Module]
    gated_names: tuple[str, ...]
    adapted = False
    """Whether the host stood in an adapter of PEFT already when it was made."""

    @property
    def base_layer(self) -> NoReturn:
        """Nothing: PEFT asks for this of each module that it is about to adapt.

        Its adapters write into `weight.data` when they merge, and here that is a value for one pass.
        """
        if self.adapted:
            raise AttributeError("base_layer")
        raise ConversionError(
            f"PEFT cannot adapt a {self.plain_type.__name__} whose parameters have gates: a merge would be lost. "
            "Add the adapters first, and convert the model with them."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {key: value for key, value in vars(self).items() if key != "_flat_weight_refs"}
        return _blank, (self.plain_type, self.gated_names), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[arg-type]

    def reset_parameters(self) -> None:
        """Start parameters and gates anew."""
        plain: Any = twin(self, {})  # type: ignore[arg-type]
        if hasattr(plain, "reset_parameters"):
            plain.reset_parameters()
        for gates in gates_of(self).values():  # type: ignore[arg-type]
            gates.reset_parameters()


class _RecurrentHost(Host):
    """Reads each weight once for a sequence, and leaves its list of them alone."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        own: Any = self
        weights = {name: getattr(own, name) for name in own._flat_weights_names}
        run: Any = _new(self.plain_type, {**vars(self), "_parameters": weights, "_modules": {}})
        run._flat_weights = list(weights.values())
        run._flat_weight_refs = [weakref.ref(weight) for weight in run._flat_weights]
        return self.plain_type.forward(run, input, hx)

    def flatten_parameters(self) -> None:
        """Nothing: the weights of a pass are made in it."""

    def _init_flat_weights(self) -> None:
        pass

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return nn.Module._apply(self, fn, recurse)  # type: ignore[arg-type]

    def __setattr__(self, name: str, value: Any) -> None:
        nn.Module.__setattr__(self, name, value)  # type: ignore[arg-type]


_classes: dict[tuple[Any, tuple[str, ...]], type[Any]] = {}


def host_class(plain_type: Any, names: tuple[str, ...]) -> type[Any]:
    """The subclass of a module's type in which parameters are gated, always the same one."""
    if (plain_type, names) in _classes:
        return _classes[plain_type, names]
    base = _RecurrentHost if issubclass(plain_type, RECURRENT) else Host
    members: dict[str, Any] = {name: _gated(name) for name in names}
    members |= {"plain_type": plain_type, "gated_names": names, "__module__": __name__}
    return _classes.setdefault((plain_type, names), type(f"Gated{plain_type.__name__}", (base, plain_type), members))


def _gated(name: str) -> property:
    def read(self: nn.Module) -> Tensor:
        own = self._parameters[name]
        if own is not None and hasattr(
            own, "full_tensor"
        ):  # FSDP looks at what it has sharded, and no pass is under way
            return own
        gates: Any = self._modules[CONNECTIONS]
        value: Tensor = gates._modules[name].value()
        return value

    return property(read, doc=f"The parameter {name!r} under the gates of the pass.")


def _blank(plain_type: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    made: nn.Module = _new(host_class(plain_type, names) if names else plain_type, {})
    return made


def _new(kind: type[Any], attributes: Mapping[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    made.__dict__.update(attributes)
    return made


# ------------------------------------------------------------------------------------------ there and back


def host_of(
    module: nn.Module,
    names: Iterable[str],
    kind: str,
    options: Mapping[str, Any],
    shared: dict[int, tuple[Any, str]],
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> nn.Module:
    """A module like the one given, with gates on parameters; the module itself stays as it is.

    ``shared`` has the layer and the name there of each parameter that is gated already, and gets what is new. ``own``
    are options of single parameters.
    """
    names = tuple(names)
    made: nn.Module = _new(host_class(type(module), names), _attributes(module))
    connections = Connections()
    made._modules[CONNECTIONS] = connections.train(module.training)
    for name in names:
        gates: ParameterGates = PARAMETER_GATES[kind](made, name, **{**options, **(own or {}).get(name, {})})
        connections.add_module(name, gates.train(module.training))
        share(gates, "weight", shared)
    return made


def share(layer: Any, name: str, shared: dict[int, tuple[Any, str]]) -> None:
    """Give a layer's parameter the posterior of the layer that had the same parameter first."""
    if not isinstance(layer, DropConnectPPLayer):
        return
    parameter = layer.weight if isinstance(layer, ParameterGates) else layer._parameters[name]
    first = shared.setdefault(id(parameter), (layer, name))
    if first[0] is layer:
        return
    twin_layer, own = first
    for key in layer.posterior_names_of(name):
        layer.register_parameter(key, getattr(twin_layer, own + key.removeprefix(name)))


def twin(host: nn.Module, values: Mapping[str, nn.Parameter]) -> nn.Module:
    """The module without gates, with new values for some parameters and the others shared."""
    return without(host, {name: values.get(name) for name in host.gated_names})  # type: ignore[union-attr]


def without(host: Any, values: Mapping[str, nn.Parameter | None]) -> nn.Module:
    """The module without the gates of the parameters named, which get new values where they are given."""
    left = tuple(name for name in host.gated_names if name not in values)
    made: Any = _new(host_class(host.plain_type, left) if left else host.plain_type, _attributes(host))
    made._parameters.update({name: value for name, value in values.items() if value is not None})
    if left:
        connections = Connections()
        made._modules[CONNECTIONS] = connections
        for name in left:
            gates = gates_of(host)[name]
            gates.move_to(made)
            connections.add_module(name, gates)
    else:
        del made._modules[CONNECTIONS]
    if isinstance(made, RECURRENT) and not left:
        made._init_flat_weights()
    plain: nn.Module = made
    return plain


def gates_of(host: nn.Module) -> dict[str, ParameterGates]:
    """A host's gates by the names of their parameters."""
    connections = host._modules[CONNECTIONS]
    assert connections is not None
    return dict(connections._modules)  # type: ignore[arg-type]


def module_name(name: str) -> str:
    """The module that a masked layer's name stands for: the host where it is gates of a parameter.

    >>> module_name("encoder.lstm.connections.weight_hh_l0"), module_name("encoder.fc")
    ('encoder.lstm', 'encoder.fc')
    """
    before, found, _ = f".{name}".rpartition(f".{CONNECTIONS}.")
    return before.removeprefix(".") if found else name


def _attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes for another instance; its parameters, buffers and submodules are the same objects."""
    found = {key: dict(value) if type(value) is dict else value for key, value in vars(module).items()}
    for key in ("_flat_weights", "_flat_weight_refs"):
        found.pop(key, None)
    return found


# ------------------------------------------------------------------------------------------- what can be


def is_huggings_conv1d(module: nn.Module) -> bool:
    """Whether a module is Hugging Face's Conv1D, GPT-2's linear layer."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def floating_names(module: nn.Module) -> list[str]:
    """The parameters that can have gates."""
    return [n for n, value in module._parameters.items() if value is not None and value.is_floating_point()]


def check(module: nn.Module) -> str | None:
    """Why a module's parameters cannot be gated; None if they can."""
    if isinstance(module, Host):
        return "its parameters are gated already"
    if hasattr(module, "_hf_hook") or "forward" in vars(module):
        return "its forward was replaced, by accelerate for example; convert the model first, and dispatch it then"
    if hasattr(module, CONNECTIONS):
        return f"it has an attribute {CONNECTIONS!r} of its own"
    if isinstance(module, ON_REQUEST) and getattr(module, "max_norm", None) is not None:
        return "max_norm changes its weight in each pass; leave max_norm out"
    if isinstance(module, ON_REQUEST) and getattr(module, "sparse", False):
        return "its gradient is sparse, and that of gated weights is not; use sparse=False"
    if any(nn.parameter.is_lazy(value) for value in module._parameters.values() if value is not None):
        return "its shape is not known yet; run the model once on a batch first"
    if not floating_names(module):
        return "it has no parameters of its own that could have gates"
    return None


def require(name: str, obstacle: str | None) -> None:
    """Raise if something stands in the way of gates that were asked for by name."""
    if obstacle is not None:
        raise ConversionError(f"convert: {name or 'the model'} cannot be converted: {obstacle}.")
