"""Whole steps by the GPU's kernels against the plain path on the same masks: on a GPU, or interpreted on the CPU."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dropconnectpp as dcpp
from dropconnectpp.layers.base import masked_layers
from dropconnectpp.layers.passes import BinaryGates, assigned
from dropconnectpp.ops import gpu, gpu_gates, noise, posterior
from dropconnectpp.ops.prior import Prior

PLAIN = noise.Blocks.__init__


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """The CPU takes the kernels, which Triton interprets, and draws by them, as a GPU does."""

    def supported(*tensors: Tensor) -> bool:
        return all(t.is_contiguous() and t.dtype in gpu._DTYPES for t in tensors)

    def uniform(shape: torch.Size, seed: Tensor, stream: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return gpu.uniform(shape, seed, stream).to(dtype)

    def binary(logit: Tensor, shape: torch.Size, seed: Tensor, stream: int, mirrored: bool = False) -> Tensor:
        return gpu.binary(logit.contiguous(), shape, seed, stream, mirrored)

    def blocks(self: noise.Blocks, *arguments: Any) -> None:
        PLAIN(self, *arguments)
        self._kernel = True

    with (
        mock.patch.object(gpu, "supported", supported),
        mock.patch.object(noise, "uniform", uniform),
        mock.patch.object(noise, "binary", binary),
        mock.patch.object(noise.Blocks, "__init__", blocks),
    ):
        yield


class Net(nn.Module):
    """Two layers, one of them called twice, and one whose parameters are another's; recomputed if asked for."""

    def __init__(self, device: torch.device, way: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = dcpp.DropConnectPPLinear(5, 6, **options)
        self.again = dcpp.DropConnectPPLinear(6, 6, kl_weight=0.5, **options)
        self.tied = dcpp.DropConnectPPLinear(6, 6, bias=False, kl_weight=0.5, **options)
        self.tied.weight, self.tied.weight_logit = self.again.weight, self.again.weight_logit
        self.unused = dcpp.DropConnectPPLinear(2, 3, **options)
        self.last = dcpp.DropConnectPPLinear(6, 3, **options)
        self.way = way
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, std=1.0 if name.endswith("logit") else 0.5)
        self.to(device)

    def middle(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.again(x)) + self.again(torch.sin(x))
        return torch.tanh(self.tied(x))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        reentrant = self.way == "reentrant"
        x = self.middle(x) if self.way == "plain" else checkpoint(self.middle, x, use_reentrant=reentrant)
        output: Tensor = self.last(x)
        return output


def masks_of(layer: Any, gates: BinaryGates) -> dict[str, Tensor]:
    """What the kernels draw for a layer in a pass."""
    found = {}
    for name in layer.synapse_names:
        parameter = getattr(layer, name)
        if gates.each_example:
            blocks = [masks[name] for _, masks in layer.example_gates(gates).blocks(7)]
            found[name] = torch.cat(blocks)
        else:
            seed = gates.draw.seed_on(parameter.device)
            logit = layer.logit(name).detach().contiguous()
            found[name] = gpu.binary(logit, parameter.shape, seed, gates.streams[name], gates.mirrored)
    return found


def train(model: nn.Module, samples: int, autocast: bool, masks: list[dict[str, Tensor]] | None) -> Any:
    """Two steps of the bound; the masks that its passes used, or are given, and all that came of them."""
    used: list[dict[str, Tensor]] = []

    def remember(module: nn.Module, *_: Any) -> None:
        gates = {name: assigned(layer) for name, layer in masked_layers(model).items()}
        if all(isinstance(found, BinaryGates) for found in gates.values()):
            used.append(
                {
                    f"{name}.{key}": mask
                    for name, layer in masked_layers(model).items()
                    for key, mask in masks_of(layer, gates[name]).items()  # type: ignore[arg-type]
                }
            )

    device = next(model.parameters()).device
    elbo = dcpp.ELBO(model, dcpp.categorical, 50, num_samples=samples, generator=torch.Generator().manual_seed(8))
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).to(device)
    y = (torch.arange(7) % 3).to(device)
    handle = model.register_forward_pre_hook(remember) if masks is None else None
    found = []
    with nullcontext() if masks is None else dcpp.forced_masks(model, masks):
        for _ in range(2):
            model.zero_grad()
            # Triton's interpreter cuts bfloat16 off where a card rounds it.
            half = torch.bfloat16 if device.type == "cuda" else torch.float16
            with torch.autocast(device.type, half, enabled=autocast):
                terms = elbo(x, y)
            (3.0 * terms.loss).backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            found.append({"loss": terms.loss.detach(), "kl": terms.kl, "output": terms.output.detach(), **gradients})
    if handle is not None:
        handle.remove()
    found.append(dict(elbo.moments.named_buffers()))
    return found, used


def compare_steps(
    device: torch.device, estimator: str, *, mask: str = "batch", samples: int = 1, way: str = "plain", **more: Any
) -> None:
    """A step that draws in its kernels equals the step that is given those masks and takes plain operations."""
    interpreted = device.type == "cpu"
    pruned, autocast = more.pop("pruned", False), more.pop("autocast", False)
    model = Net(device, way, estimator=estimator, mask=mask, **more)
    if pruned:
        for layer in masked_layers(model).values():
            layer.keep_only("weight", (torch.arange(layer.weight.numel()) % 3 > 0).view_as(layer.weight).to(device))
    twin = copy.deepcopy(model)
    with as_on_a_gpu() if interpreted else nullcontext():
        taken = posterior.drawn_scores_supported(model.first.posterior_of("weight"), ())
        fused, masks = train(model, samples, autocast, None)
    arms = 2 if estimator == "disarm" else 1
    assert len(masks) == 2 * samples * arms
    assert taken == (more.get("hyper", "marginal") != "learned")
    with mock.patch.object(gpu, "supported", return_value=False):
        plain, _ = train(twin, samples, autocast, masks)
    tolerance = {"rtol": 2e-2, "atol": 5e-3} if autocast else {"rtol": 2e-4, "atol": 2e-6}
    for mine, theirs in zip(fused, plain, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(mine[key], value, **tolerance, msg=lambda m, key=key: f"{key}: {m}")


def compare_launches(device: torch.device) -> None:
    """A layer takes a launch forward and one backward, and a bound one more; layers that cannot are left to others."""

    def names_of(model: nn.Module, **options: Any) -> list[str]:
        x, y = torch.randn(4, 5, device=device), (torch.arange(4) % 3).to(device)
        elbo = dcpp.ELBO(model.to(device), dcpp.categorical, 50, **options)
        with mock.patch.object(gpu, "launch", wraps=gpu.launch) as launch:
            elbo(x, y).loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert bool(parameter.grad.isfinite().all())
        return [call.args[0] for call in launch.call_args_list]

    def network(*estimators: str, **options: Any) -> nn.Module:
        sizes = [(5, 6), (6, 3), (3, 3)]
        return nn.Sequential(
            *(dcpp.DropConnectPPLinear(*s, estimator=e, **options) for s, e in zip(sizes, estimators, strict=False))
        )

    with as_on_a_gpu() if device.type == "cpu" else nullcontext():
        for estimator in ("bbvi", "straight-through"):
            for checked in (False, True):
                found = names_of(network(estimator, estimator), check_finite=checked)
                wanted = ["gates_kernel", "gates_kernel", "settle_kernel", *["gates_backward_kernel"] * 2]
                assert [name for name in found if name != "binary_kernel"] == wanted
        assert "settle_kernel" in names_of(network("bbvi", "concrete", "straight-through"))
        assert "settle_kernel" not in names_of(network("bbvi", "bbvi"), num_samples=2)
        assert "settle_kernel" not in names_of(network("straight-through", "straight-through", hyper="learned"))
        frozen = network("straight-through", "straight-through")
        for layer in frozen:
            layer.weight.requires_grad_(False)
        elbo = dcpp.ELBO(frozen.to(device), dcpp.categorical, 50)
        elbo(torch.randn(4, 5, device=device), (torch.arange(4) % 3).to(device)).loss.backward()
        assert frozen[0].weight.grad is None  # type: ignore[union-attr]
        assert frozen[0].weight_logit.grad is not None  # type: ignore[union-attr]


def compare_ends(device: torch.device) -> None:
    """A step's graph goes when its terms go; layers that no pass reaches have their KL all the same."""
    x, y = torch.randn(4, 5, device=device), (torch.arange(4) % 3).to(device)
    with as_on_a_gpu() if device.type == "cpu" else nullcontext():
        for estimator in ("bbvi", "straight-through"):
            layer = dcpp.DropConnectPPLinear(5, 3, estimator=estimator, keep_probability=0.9).to(device)
            terms = dcpp.ELBO(nn.Sequential(layer), dcpp.categorical, 50)(x, y)
            terms.loss.backward()
            graph = [weakref.ref(node) for node, _ in terms.loss.grad_fn.next_functions if "Drawn" in node.name()]
            assert len(graph) == 1
            gc.disable()
            try:
                del terms
                assert graph[0]() is None, "a ring of references keeps it"
            finally:
                gc.enable()
            aside = nn.Sequential(layer)
            aside.forward = lambda x: x[:, :3]  # type: ignore[method-assign]
            found = dcpp.ELBO(aside, dcpp.categorical, 50)(x, y).kl
            wanted = sum(layer.kl(name).sum() for name in layer.synapse_names)
            torch.testing.assert_close(found, wanted.to(found), rtol=1e-5, atol=1e-5)


FEW: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bbvi", {}),
    ("bbvi", {"way": "saved tensors", "pruned": True}),
    ("bbvi", {"mask": "example"}),
    ("straight-through", {"way": "reentrant"}),
    ("straight-through", {"pruned": True, "hyper": "optimal", "alpha": 10.0, "beta": 90.0}),
    ("straight-through", {"autocast": True}),
    ("straight-through", {"mask": "example", "way": "saved tensors"}),
    ("disarm", {"samples": 2, "hyper": "optimal"}),
    ("disarm", {"way": "reentrant", "autocast": True}),
)
"""Ways of use that between them take every path of the kernels."""


def many() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every estimator with every way of use."""
    for estimator in ("bbvi", "straight-through", "disarm"):
        yield estimator, {"autocast": True}
        yield estimator, {"hyper": "learned"}
        yield estimator, {"pruned": True, "hyper": "optimal", "alpha": 10.0, "beta": 90.0}
        ways = itertools.product(("batch", "example"), ("plain", "saved tensors", "reentrant"), (1, 2))
        for turn, (mask, way, samples) in enumerate(ways):
            yield estimator, {"samples": samples, "mask": mask, "way": way, "pruned": turn % 4 in (0, 3)}


def compare_bounds(count: int, device: torch.device) -> None:
    """Kernels read and write within their tensors alone: each of these lies in the middle of a poisoned one."""
    poison, edge = 12345.0, 4096
    room: list[tuple[Tensor, Tensor]] = []

    def empty_like(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        whole = torch.full((like.numel() + 2 * edge,), poison, dtype=dtype or like.dtype, device=device)
        part = whole[edge : edge + like.numel()].view(like.shape)
        room.append((whole, part))
        return part

    seed = torch.tensor(1234567, device=device)
    logit, weight, grad = (torch.randn(count, device=device) for _ in range(3))
    with mock.patch.object(torch, "empty_like", empty_like):
        parts = [(weight, logit, None, 0), (weight[:7], logit[:7], None, 1)]
        gpu_gates.gated(parts, seed, False, None)
        gpu_gates.gated_backward([grad, grad[:7]], parts, seed, False, (True, True))
        gpu.posterior_backward(logit, None, Prior(), torch.ones((), device=device))
    assert len(room) == 7
    for whole, part in room:
        assert not bool((part == poison).any()), "left something unwritten"
        assert bool((whole[:edge] == poison).all()), "wrote before the tensor"
        assert bool((whole[edge + part.numel() :] == poison).all()), "wrote behind the tensor"


def compare_programs(count: int, device: torch.device) -> None:
    """Numbers do not depend on how many synapses a program handles, nor on a tensor's shape."""
    seed = torch.tensor(1234567, device=device)
    logit = torch.randn(count, device=device)
    found = []
    for words in (16, 64, 256):
        with mock.patch.object(gpu, "WORDS", words):
            normal = gpu.normal(torch.Size([count]), seed, 1)
            found.append(
                (gpu.uniform(torch.Size([count]), seed, 1), gpu.binary(logit, logit.shape, seed, 1, False), normal)
            )
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))
    flat = gpu.uniform(torch.Size([count]), seed, 1)
    assert torch.equal(gpu.uniform(torch.Size([1, count, 1]), seed, 1).flatten(), flat)
    assert torch.equal(gpu.uniform(torch.Size([count // 2]), seed, 1), flat[: count // 2])


def compare_moments(count: int, device: torch.device) -> None:
    """Uniform to 24 bits, normal, and without correlation between neighbours, seeds and streams."""
    seed = torch.tensor(987654321, device=device)
    shape = torch.Size([count])

    def z(values: Tensor, mean: float, variance: float) -> float:
        return abs(float((values.double().mean() - mean) / (variance / values.numel()) ** 0.5))

    u = gpu.uniform(shape, seed, 0)
    levels = (u.double() * 2**24).round()
    assert torch.equal(levels / 2**24, u.double())
    assert z(u, 0.5, 1 / 12) < 5
    assert z((u - 0.5).square(), 1 / 12, 1 / 180) < 5
    for other in (gpu.uniform(shape, seed + 1, 0), gpu.uniform(shape, seed, 1), gpu.uniform(shape, seed, 0, 1)):
        assert z((u - 0.5) * (other - 0.5), 0.0, 1 / 144) < 5
    for lag in (1, 2, 3, 4):
        assert z((u[lag:] - 0.5) * (u[:-lag] - 0.5), 0.0, 1 / 144) < 5
    x = gpu.normal(shape, seed, 0)
    assert z(x, 0.0, 1.0) < 5
    assert z(x.square(), 1.0, 2.0) < 5
    assert z(x**4, 3.0, 96.0) < 5
    for lag in (1, 2):
        assert z(x[lag:] * x[:-lag], 0.0, 1.0) < 5
        assert z(x[lag:].square() * x[:-lag].square(), 1.0, 8.0) < 5
