"""The kernel for a step's images: interpreted on the CPU everywhere, and on a GPU, against its plain-torch twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dropconnectpp.lab.config.protocol import Normalisation
from dropconnectpp.lab.data.dataset import DataError
from dropconnectpp.lab.data.normalisation import channel_statistics, standardise
from dropconnectpp.lab.kernels.images import gather_standardised, supported

# Launched by hand: the package takes CUDA tensors alone. The output lies in a poisoned buffer, so that a write outside
# its range shows too.
INTERPRETED = """
import torch
from dropconnectpp.lab.data.normalisation import channel_statistics
from dropconnectpp.lab.kernels.images import channel_arguments, gather_standardised
from dropconnectpp.lab.kernels.images_triton import image_kernel
from dropconnectpp.lab.config.protocol import Normalisation

torch.manual_seed(0)

def gathered(channels, height, width, block, scope, dtype):
    images = torch.randint(0, 256, (5, channels, height, width), dtype=torch.uint8)
    images[3] = 200
    images[4], images[4, 0, 0, 0] = 17, 18
    chosen = torch.tensor([[4, 0, 3], [3, 2, 1]])
    normalisation = Normalisation(scope=scope)
    statistics = channel_statistics(images)
    room = torch.full((8, height, width, channels), 77.0, dtype=dtype)
    image_kernel[(6,)](
        images, chosen, room[1:], *channel_arguments(channels, normalisation, statistics),
        OWN=scope == "image", C=channels, PIXELS=height * width, BLOCK=block,
    )
    wanted = gather_standardised(images, chosen, normalisation, statistics, torch.float64)
    found = room[1:7].unflatten(0, (2, 3)).permute(0, 1, 4, 2, 3)
    digits = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(found.double(), wanted, rtol=digits, atol=1e-5), (channels, height, width, block, scope)
    if scope == "image":
        assert (found[0, 2] == 0).all() and (found[1, 0] == 0).all()
        assert abs(found[0, 0].double().square().mean() - 1) < digits
    assert (room[[0, 7]] == 77.0).all()

for scope in ("image", "data-set"):
    for channels, height, width, block in ((1, 3, 5, 4), (2, 4, 4, 8), (3, 5, 3, 16), (3, 4, 4, 64)):
        gathered(channels, height, width, block, scope, torch.float32)
    gathered(3, 5, 5, 32, scope, torch.bfloat16)
print("all well")
"""


@pytest.mark.triton
def test_the_interpreted_kernel_is_its_twin(run_interpreted: Callable[..., None]) -> None:
    run_interpreted(INTERPRETED)


def some_images(count: int, channels: int, side: int) -> torch.Tensor:
    images = torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8)
    images[1] = 255
    return images


@pytest.mark.parametrize(
    "normalisation",
    [
        Normalisation(),
        Normalisation(scope="channel"),
        Normalisation(scope="data-set"),
        Normalisation(local_contrast=True, window=3),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_twin_is_standardise_with_channels_last(normalisation: Normalisation, dtype: torch.dtype) -> None:
    images, chosen = some_images(6, 3, 8), torch.tensor([[0, 5, 1], [2, 2, 4]])
    statistics = channel_statistics(images)
    found = gather_standardised(images, chosen, normalisation, statistics, dtype)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    wanted = standardise(images[chosen], normalisation, statistics=statistics, dtype=exact).to(dtype)
    assert torch.equal(found, wanted)
    assert found.dtype == dtype
    assert found.permute(0, 1, 3, 4, 2).is_contiguous()


def test_the_cpu_never_takes_the_kernel() -> None:
    assert not supported(some_images(2, 3, 4), torch.tensor([[0]]), Normalisation(), torch.float32)


def test_statistics_that_are_missing_are_asked_for() -> None:
    with pytest.raises(DataError, match="needs statistics"):
        gather_standardised(
            some_images(2, 3, 4), torch.tensor([[0]]), Normalisation(scope="data-set"), None, torch.float32
        )


# ---------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["image", "data-set"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("count", "channels", "side", "replicas", "batch"), [(1000, 3, 32, 50, 128), (200, 2, 96, 8, 32), (9, 1, 7, 3, 5)]
)
def test_images_on_a_gpu_are_those_of_the_twin(
    count: int, channels: int, side: int, replicas: int, batch: int, dtype: torch.dtype, scope: str
) -> None:
    images = some_images(count, channels, side)
    chosen = torch.randint(0, count, (replicas, batch))
    chosen[0, 0] = 1
    normalisation, statistics = Normalisation(scope=scope), channel_statistics(images)  # type: ignore[arg-type]
    images, chosen = images.cuda(), chosen.cuda()
    assert supported(images, chosen, normalisation, dtype)
    wanted = standardise(images[chosen], normalisation, statistics=statistics)
    rounding = 8e-3 if dtype == torch.bfloat16 else 2e-6
    first = None
    for _ in range(3):
        found = gather_standardised(images, chosen, normalisation, statistics, dtype)
        assert found.shape == (replicas, batch, channels, side, side)
        assert found.dtype == dtype
        assert found.permute(0, 1, 3, 4, 2).is_contiguous()
        torch.testing.assert_close(found.float(), wanted, rtol=rounding, atol=1e-5)
        first = found if first is None else first
        assert torch.equal(first, found), "the same every time"
    if scope == "image":
        assert (first[0, 0] == 0).all(), "a constant image"


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["image", "data-set"])
def test_a_cuda_graph_may_hold_the_kernel(scope: str) -> None:
    images = some_images(50, 3, 8)
    normalisation, statistics = Normalisation(scope=scope), channel_statistics(images)  # type: ignore[arg-type]
    images, chosen = images.cuda(), torch.zeros((2, 4), dtype=torch.int64, device="cuda")
    gather_standardised(images, chosen, normalisation, statistics, torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gather_standardised(images, chosen, normalisation, statistics, torch.float32)
    for step in range(3):
        chosen.copy_(torch.arange(8).view(2, 4) + step)
        graph.replay()
        wanted = standardise(images[chosen], normalisation, statistics=statistics)
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-5)
