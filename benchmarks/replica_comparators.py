"""The ways of PyTorch that `replica_step.py` compares the laboratory's stack with: one replica, or compiled groups."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from replica_stacks import EPSILON, IMAGES, STEP_SIZE, Figures, Settings, random_images, reason
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.data.normalisation import standardise
from dropconnectpp.lab.replicas.network import Shape, start


def network(method: Method, shape: Shape) -> nn.Module:
    """The network as a user would have it."""
    architecture, channels = shape.architecture, shape.channels
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (maps, pooled) in enumerate(zip(architecture.maps, architecture.pooled, strict=True)):
        layers[f"conv{number}"] = nn.Conv2d(channels, maps, architecture.filter_size, padding=architecture.padding)
        if pooled:
            layers[f"pool{number}"] = nn.MaxPool2d(
                architecture.pool_size, architecture.pool_stride, ceil_mode=architecture.ceil_mode
            )
        layers[f"relu{number}"] = nn.ReLU()
        channels = maps
    units, inputs = shape.dense
    layers |= {"flatten": nn.Flatten(), "dense": nn.Linear(inputs, units), "relu": nn.ReLU()}
    if method.kind == "dropout":
        layers["dropout"] = nn.Dropout(method.rate or 0.0)
    layers["output"] = nn.Linear(units, shape.classes)
    model: nn.Module = nn.Sequential(layers)
    if method.kind == "dropconnect":
        model = dcpp.convert(model, include=["dense"], kind="dropconnect", keep_probability=1.0 - (method.rate or 0.0))
    elif method.kind == "dropconnect++":
        model = dcpp.convert(model, include=["dense"], estimator=method.estimator, hyper=method.hyper)
    return model


class One:
    """One replica, its images and its optimiser. Batches follow each other by a counter on the device."""

    def __init__(self, settings: Settings, method: Method, hidden: int) -> None:
        torch.manual_seed(0)
        dataset, device = random_images(settings.classes), settings.where
        self.images, self.labels = (
            torch.from_numpy(a).to(device) for a in (dataset.train.images, dataset.train.labels)
        )
        batches = torch.randperm(IMAGES).split(settings.batch)[: settings.steps]
        self.order = torch.stack(batches).to(device)  # (steps, B)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.model = network(method, settings.shape(hidden)).to(device)
        # A check for finite values would wait for the GPU at every step.
        self.elbo = dcpp.ELBO(self.model, dcpp.categorical, 50_000, check_finite=False)
        self.learned = method.kind == "dropconnect++"
        self.optimizer = torch.optim.Adagrad(dcpp.parameter_groups(self.model, lr=STEP_SIZE), eps=EPSILON)

    def step(self) -> None:
        rows = self.order[self.position].flatten()
        x, y = standardise(self.images[rows]), self.labels[rows]
        self.optimizer.zero_grad()
        loss = self.elbo(x, target=y).loss if self.learned else F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.position.add_(1).remainder_(len(self.order))


def eager_step(settings: Settings, method: Method, hidden: int) -> float:
    """Microseconds per step of one replica, launched by Python."""
    one = One(settings, method, hidden)
    one.step()
    return settings.median(repeated(one.step, len(one.order)), len(one.order))


def graph_step(settings: Settings, method: Method, hidden: int) -> float:
    """Microseconds per step of one replica, replayed."""
    one = One(settings, method, hidden)
    graph = captured(one.step)
    return settings.median(repeated(graph.replay, len(one.order)), len(one.order))


def repeated(run: Callable[[], None], times: int) -> Callable[[], None]:
    """So many calls as one: a single step is too short to time."""

    def calls() -> None:
        for _ in range(times):
            run()

    return calls


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A step as a CUDA graph, after a few outside it on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except Exception:
        torch.cuda.synchronize()
        raise
    graph.replay()
    return graph


class Groups:
    """R replicas as grouped convolutions in plain torch, forward and backward and Adagrad compiled."""

    def __init__(self, settings: Settings, hidden: int) -> None:
        torch._dynamo.reset()
        dataset, device = random_images(settings.classes), settings.where
        self.images, self.labels = (
            torch.from_numpy(a).to(device) for a in (dataset.train.images, dataset.train.labels)
        )
        count = settings.replicas
        orders = torch.stack([torch.randperm(IMAGES)[: settings.steps * settings.batch] for _ in range(count)])
        self.order = orders.view(count, settings.steps, settings.batch).transpose(0, 1).contiguous().to(device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        shape = settings.shape(hidden)
        self.architecture = shape.architecture
        self.parameters = start(shape, 0, torch.arange(count, device=device), torch.float32)
        for value in self.parameters.values():
            value.requires_grad_()
        self.sums = [torch.zeros_like(value) for value in self.parameters.values()]
        self.compiled_loss = torch.compile(self.loss, dynamic=False)
        self.compiled_update = torch.compile(adagrad, dynamic=False)

    def loss(self, images: Tensor, labels: Tensor, rows: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """The sum over replicas of the mean loss on their batches: rows (R, B) of the images and labels."""
        replicas = len(rows)
        low = {name: value.to(torch.bfloat16) for name, value in parameters.items()}
        x = standardise(images[rows]).to(torch.bfloat16).transpose(0, 1).flatten(1, 2)
        x = x.contiguous(memory_format=torch.channels_last)
        for layer, pooled in enumerate(self.architecture.pooled):
            weight, bias = low[f"conv{layer}.weight"], low[f"conv{layer}.bias"]
            filters = weight.flatten(0, 1).contiguous(memory_format=torch.channels_last)
            x = F.conv2d(x, filters, bias.flatten(), padding=self.architecture.padding, groups=replicas)
            if pooled:
                size, stride = self.architecture.pool_size, self.architecture.pool_stride
                x = F.max_pool2d(x, size, stride, ceil_mode=self.architecture.ceil_mode)
            x = torch.relu(x)
        flat = x.unflatten(1, (replicas, -1)).transpose(0, 1).flatten(2)
        units = torch.relu(dense(flat, low["dense.weight"], low["dense.bias"]))
        logits = dense(units, low["output.weight"], low["output.bias"]).float()
        return F.cross_entropy(logits.flatten(0, 1), labels[rows].flatten()) * replicas

    def step(self) -> None:
        rows = self.order[self.position].squeeze(0)
        values = list(self.parameters.values())
        loss = self.compiled_loss(self.images, self.labels, rows, self.parameters)
        gradients = torch.autograd.grad(loss, values)
        self.compiled_update([value.detach() for value in values], list(gradients), self.sums)
        self.position.add_(1).remainder_(len(self.order))


def dense(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (R, B, I), weight (R, O, I), bias (R, O) -> (R, B, O)."""
    return torch.bmm(x, weight.transpose(1, 2)) + bias.unsqueeze(1)


def adagrad(values: list[Tensor], gradients: list[Tensor], sums: list[Tensor]) -> None:
    """p -= step g / sqrt(sum g^2 + epsilon)."""
    torch._foreach_addcmul_(sums, gradients, gradients)
    roots = torch._foreach_sqrt(torch._foreach_add(sums, EPSILON))
    torch._foreach_addcdiv_(values, gradients, roots, value=-STEP_SIZE)


def compiled_step(settings: Settings, hidden: int, figures: Figures) -> float:
    """Microseconds per replica and step; without a CUDA graph where it cannot be captured."""
    groups = Groups(settings, hidden)
    groups.step()
    steps = len(groups.order) * settings.replicas
    if settings.gpu:
        try:
            graph = captured(groups.step)
            return settings.median(repeated(graph.replay, len(groups.order)), steps)
        except Exception as error:
            figures.note(f"compiled groups, {hidden} units: timed without a CUDA graph ({reason(error)})")
    return settings.median(repeated(groups.step, len(groups.order)), steps)
