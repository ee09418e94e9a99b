"""The CUDA kernels of the convolutions: emulated on the CPU with g++ everywhere, and on a GPU, against plain torch."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d

from dropconnectpp.lab.config.protocol import Architecture, pooled_side
from dropconnectpp.lab.kernels import convolution
from dropconnectpp.lab.kernels.convolution_launch import (
    SHARED_BYTES,
    CudaLaunch,
    Layer,
    arrange_launch,
    filter_launch,
    forward_launch,
    input_launch,
    layer_supported,
    layers_of,
)
from dropconnectpp.lab.replicas import convolutions

# ------------------------------------------------------------------------------------------ the definition


def defined(layer: Layer, x: Tensor, filters: Tensor, bias: Tensor) -> Tensor:
    """One replica in plain torch: x (B, C, H, W)."""
    y = conv2d(x, filters, bias, padding=layer.filter // 2)
    if layer.pool:
        y = max_pool2d(y, layer.pool, layer.stride, ceil_mode=True)
    return torch.relu(y)


def layer_of(side: int, inputs: int, outputs: int, filter_side: int, pool: int = 0, stride: int = 1) -> Layer:
    after = pooled_side(side, pool, stride, True) if pool else side
    return Layer(side, inputs, outputs, filter_side, pool, stride, after)


class Case:
    """Small whole numbers for a layer, and what plain torch makes of them in float64.

    bf16 holds them, and nearly all of what comes of them: the kernels must agree exactly, ties in windows included,
    where nothing is rounded, and to bf16's rounding elsewhere.
    """

    def __init__(self, layer: Layer, replicas: int, batch: int, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(layer.side * 1000 + replicas + seed)

        def whole(limit: int, *shape: int) -> Tensor:
            return torch.randint(-limit, limit + 1, shape, generator=random).float()

        self.layer, self.batch = layer, batch
        self.x = whole(2, replicas, batch, layer.inputs, layer.side, layer.side)
        self.filters = whole(1, replicas, layer.outputs, layer.inputs, layer.filter, layer.filter)
        self.bias = whole(3, replicas, layer.outputs)
        leaves = [t.double().requires_grad_() for t in (self.x, self.filters, self.bias)]
        y = torch.stack([defined(layer, *(leaf[r] for leaf in leaves)) for r in range(replicas)])
        self.gradient = whole(2, *y.shape) * (whole(2, *y.shape) > 1)
        self.y = y.detach()
        self.expected = torch.autograd.grad(y, leaves, self.gradient.double())

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor]:
        """Images or maps, filters and bias, as `convolution.forward` takes them."""
        return channels_last(self.x.bfloat16()), self.filters, self.bias

    @property
    def laid_gradient(self) -> Tensor:
        gradient = self.gradient.bfloat16()
        return channels_last(gradient) if self.layer.pool else gradient

    def check(self, y: Tensor, grad_x: Tensor | None, grad_filters: Tensor, grad_bias: Tensor) -> None:
        assert float(self.y.max()) <= 256, "these numbers are not whole in bf16: choose smaller ones"
        y = y.permute(0, 1, 4, 2, 3) if self.layer.pool else y
        assert torch.equal(y.cpu(), self.y.bfloat16())
        if grad_x is not None:
            assert torch.equal(grad_x.permute(0, 1, 4, 2, 3).cpu(), self.expected[0].bfloat16())
        assert torch.equal(grad_filters.cpu(), self.expected[1].float())
        assert torch.equal(grad_bias.cpu(), self.expected[2].float())


def channels_last(maps: Tensor) -> Tensor:
    return maps.permute(0, 1, 3, 4, 2).contiguous()


# -------------------------------------------------------------------------------------- emulated on a CPU


HERE = Path(__file__).parent
COMPILE = ["g++", "-O1", "-w", "-std=c++17", "-fPIC"]


class Emulated:
    """Launches as functions of libraries that g++ makes, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.headers = folder, folder / "emulated_cuda.hpp"
        shutil.copy(HERE / self.headers.name, folder)  # g++ looks for what it has precompiled beside a header
        subprocess.run([*COMPILE, "-x", "c++-header", str(self.headers)], check=True, capture_output=True)

    def library(self, launch: CudaLaunch) -> Path:
        library = self.folder / f"{launch.name}_{abs(hash(launch))}.so"
        if not library.exists():
            source = Path(convolution.__file__).with_name("convolution.cu")
            options = [f"-D{key}={value}" for key, value in launch.settings]
            command = [*COMPILE, "-shared", "-include", str(self.headers), *options]
            command += [f'-DSOURCE="{source}"', "-x", "c++", str(HERE / "emulated_convolution.cpp"), "-o", str(library)]
            subprocess.run(command, check=True, capture_output=True)
        return library

    def start(self, launch: CudaLaunch, grid: tuple[int, int, int], arguments: list[Tensor | int]) -> None:
        """What `convolution._start` does on a GPU."""
        given = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_int(a) for a in arguments]
        run = ctypes.CDLL(str(self.library(launch))).run
        failed = run(*map(ctypes.c_int, (*grid, launch.threads, launch.shared)), *given)
        problems = ["", "wrote behind its shared memory", "met a misaligned address", "left copies nobody waited for"]
        assert not failed, problems[failed]


@pytest.fixture(scope="session")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def emulated(emulation: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(shape, **options) -> Tensor:
        fill = {torch.int32: 0x7FC07FC0, torch.uint8: 99}.get(options.get("dtype"), float("nan"))
        return torch.full(shape, fill, **options)

    monkeypatch.setattr(convolution, "_start", emulation.start)
    monkeypatch.setattr(convolution, "_limit", lambda device: SHARED_BYTES)
    monkeypatch.setattr(convolution.torch, "empty", empty)
    monkeypatch.setattr(convolution.torch, "empty_like", lambda t: torch.full_like(t, float("nan")))


SMALL = [
    pytest.param(layer_of(8, 3, 32, 5, 3, 2), 2, 3, id="images of three colours"),
    pytest.param(layer_of(7, 1, 32, 5, 3, 2), 1, 2, id="grey images of odd side"),
    pytest.param(layer_of(18, 2, 32, 3, 2, 2), 1, 2, id="two cameras, two strips"),
    pytest.param(layer_of(8, 32, 32, 3, 3, 2), 2, 5, id="maps, two lines a tile"),
    pytest.param(layer_of(14, 32, 32, 3, 3, 2), 1, 2, id="maps, a line a tile"),
    pytest.param(layer_of(7, 32, 64, 3), 1, 3, id="last, odd side"),
    pytest.param(layer_of(4, 32, 32, 5), 2, 13, id="last, more images than a group"),
    pytest.param(layer_of(8, 3, 32, 5, 3, 2), 1, 11, id="images, more than a group"),
]


@pytest.mark.compiler
@pytest.mark.parametrize(("layer", "replicas", "batch"), SMALL)
def test_emulated_kernels_are_the_definition(emulated, layer: Layer, replicas: int, batch: int) -> None:
    case = Case(layer, replicas, batch)
    passed = convolution.forward(layer, *case.given)
    case.check(passed.y, *convolution.backward(layer, passed, case.laid_gradient, case.filters))


@pytest.mark.compiler
def test_emulated_layers_make_a_network_with_gradients(emulated) -> None:
    """Against the float64 twin: bf16 rounds maps and their gradients, and a maximum may then lie elsewhere."""
    architecture = Architecture(maps=(32, 32), pooled=(True, False), filter_size=3, padding=1, hidden=4)
    random = torch.Generator().manual_seed(3)
    images = torch.randn(2, 3, 1, 8, 8, generator=random).bfloat16()
    shapes = {"conv0.weight": (32, 1, 3, 3), "conv0.bias": (32,), "conv1.weight": (32, 32, 3, 3), "conv1.bias": (32,)}
    parameters = {
        name: (torch.randn(2, *shape, generator=random) * 0.3).requires_grad_() for name, shape in shapes.items()
    }
    found = convolution.features(images, parameters, architecture)
    twins = {name: value.detach().double().requires_grad_() for name, value in parameters.items()}
    expected = convolutions.features(images.double(), twins, architecture)
    assert found.shape == expected.shape == (2, 3, 32 * 4 * 4)
    assert distance(found, expected) < 0.01
    gradient = torch.randn(expected.shape, generator=random).bfloat16()
    back = torch.autograd.grad(found, list(parameters.values()), gradient)
    wanted = torch.autograd.grad(expected, list(twins.values()), gradient.double())
    for name, one, other in zip(parameters, back, wanted, strict=True):
        assert one.dtype == torch.float32
        assert distance(one, other) < 0.1, name  # exactness is the other tests' matter


def distance(one: Tensor, other: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    one, other = one.detach().double(), other.detach()
    return float((one - other).norm() / other.norm())


# ----------------------------------------------------------------------------------------- what is covered


@pytest.mark.parametrize(
    "other",
    [
        {"pooled": (True, True, True)},
        {"pooled": (False, True, False)},
        {"maps": (32, 48, 64)},
        {"maps": (16, 32, 64)},
        {"padding": 0},
        {"filter_size": 4, "padding": 2},
        {"filter_size": 9, "padding": 4},
        {"pool_size": 4},
    ],
    ids=str,
)
def test_other_architectures_go_through_plain_torch(other: dict) -> None:
    assert layers_of(Architecture(), 3, 32) is not None
    assert layers_of(replace(Architecture(), **other), 3, 32) is None


def test_images_with_many_channels_and_a_cpu_go_through_plain_torch() -> None:
    assert layers_of(Architecture(), 4, 32) is None  # 5 x 4 numbers of a window's row do not fit 16
    assert not convolution.supported(torch.zeros(1, 2, 3, 32, 32, dtype=torch.bfloat16), Architecture())


@pytest.mark.parametrize("limit", [SHARED_BYTES, 101_376])
@pytest.mark.parametrize(("channels", "side"), [(3, 32), (1, 28), (2, 32), (3, 8), (2, 96)])
def test_launches_fit_the_shared_memory_of_small_cards(channels: int, side: int, limit: int) -> None:
    layers = layers_of(Architecture(), channels, side)
    assert layers is not None
    for layer in layers:
        launches = [forward_launch(layer, limit), filter_launch(layer, limit)]
        launches += [] if layer.first else [input_launch(layer, limit)]
        for launch in launches:
            assert launch.shared <= limit, launch
            assert launch.threads <= 1024


def test_a_layer_too_large_for_a_card_goes_through_plain_torch() -> None:
    layers = layers_of(Architecture(maps=(96, 256, 256)), 2, 96)
    assert layers is not None
    assert not all(layer_supported(layer, SHARED_BYTES) for layer in layers)
    usual = layers_of(Architecture(), 3, 32)
    assert usual is not None
    assert all(layer_supported(layer, 101_376) for layer in usual)


def test_every_thread_has_the_cards_context_before_its_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def compiled(launch: CudaLaunch, device: int) -> Any:
        events.append(f"kernel on {device}")
        return lambda **how: None

    monkeypatch.setattr(convolution, "_entered", threading.local())
    monkeypatch.setattr(convolution, "_kernel", compiled)
    monkeypatch.setattr(convolution.torch.cuda, "mem_get_info", lambda device: events.append(f"context of {device}"))
    launch = arrange_launch(LAYERS[0], False)

    def work() -> None:
        for card in (0, 0, 1):
            convolution._start(launch, (1, 1, 1), [SimpleNamespace(device=SimpleNamespace(index=card))])

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    first, second = ["context of 0", "kernel on 0", "kernel on 0"], ["context of 1", "kernel on 1"]
    assert events == 2 * (first + second)


# ---------------------------------------------------------------------------------------------- on a GPU

LAYERS = [
    layer_of(32, 3, 32, 5, 3, 2),
    layer_of(16, 32, 32, 5, 3, 2),
    layer_of(8, 32, 64, 5),
    layer_of(28, 1, 32, 5, 3, 2),
    layer_of(14, 32, 32, 5, 3, 2),
    layer_of(7, 32, 64, 5),
    layer_of(96, 2, 32, 5, 3, 2),
    layer_of(48, 32, 32, 5, 3, 2),
    layer_of(24, 32, 64, 5),
    layer_of(13, 3, 64, 3, 2, 2),
    layer_of(9, 64, 32, 3, 2, 1),
]


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.inputs}x{layer.side}x{layer.side}")
@pytest.mark.parametrize(("replicas", "batch"), [(1, 11), (3, 5)])
def test_kernels_on_a_gpu_are_the_definition(layer: Layer, replicas: int, batch: int) -> None:
    case = Case(layer, replicas, batch)
    x, filters, bias = (t.cuda() for t in case.given)
    for _ in range(3):
        passed = convolution.forward(layer, x, filters, bias)
        case.check(passed.y, *convolution.backward(layer, passed, case.laid_gradient.cuda(), filters))


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS[:3], ids=lambda layer: f"{layer.inputs}x{layer.side}x{layer.side}")
@pytest.mark.parametrize(("replicas", "batch"), [(200, 2), (2, 128), (7, 129)])
def test_any_number_of_replicas_and_images_on_a_gpu(layer: Layer, replicas: int, batch: int) -> None:
    test_kernels_on_a_gpu_are_the_definition(layer, replicas, batch)


@pytest.mark.gpu
def test_a_replicas_numbers_on_a_gpu_do_not_depend_on_the_others() -> None:
    random = torch.Generator().manual_seed(5)
    for layer in LAYERS[:3]:
        shape = (9, 128, layer.side, layer.side, layer.inputs)
        x = torch.randn(shape, generator=random).bfloat16().cuda()
        filters = torch.randn(9, layer.outputs, layer.inputs, 5, 5, generator=random).cuda() * 0.05
        bias = torch.randn(9, layer.outputs, generator=random).cuda()
        together = convolution.forward(layer, x, filters, bias)
        gradient = torch.randn(together.y.shape, generator=random).bfloat16().cuda()
        back = convolution.backward(layer, together, gradient, filters)
        one = slice(6, 7)
        alone = convolution.forward(layer, x[one].clone(), filters[one].clone(), bias[one].clone())
        assert torch.equal(alone.y, together.y[one])
        for single, all_of_them in zip(
            convolution.backward(layer, alone, gradient[one].clone(), filters[one].clone()), back, strict=True
        ):
            assert (single is None) == (all_of_them is None)
            assert single is None or torch.equal(single, all_of_them[one])
