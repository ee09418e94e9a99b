"""On a CUDA device: training under autocast, generators of either device, a step as a CUDA graph, the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("estimator", ["bbvi", "straight-through", "local", "concrete", "disarm"])
@pytest.mark.parametrize("mask", ["batch", "example"])
def test_training_learns_under_autocast_with_a_generator_of_either_device(estimator: str, mask: str) -> None:
    x = torch.randn(256, 20, device="cuda")
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2)).cuda()
    model = dcpp.convert(model, ["0"], estimator=estimator, mask=mask)
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=256, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(dcpp.parameter_groups(model, lr=0.01))
    likelihoods = []
    for _ in range(80):
        with torch.autocast("cuda", torch.bfloat16):
            terms = elbo(x, target=y)
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
        likelihoods.append(terms.log_likelihood.item() / 256)
    assert sum(likelihoods[-10:]) / 10 > -0.25 > likelihoods[0]
    found = [
        dcpp.predict(model, x, num_samples=5, generator=g).mean
        for g in (torch.Generator("cuda").manual_seed(3), torch.Generator("cuda").manual_seed(3))
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("estimator", ["bbvi", "straight-through", "concrete", "disarm"])
def test_a_step_can_be_captured_in_a_cuda_graph_and_draws_new_masks(estimator: str) -> None:
    layer = dcpp.DropConnectPPLinear(64, 8, device="cuda", estimator=estimator)
    elbo = dcpp.ELBO(nn.Sequential(layer), dcpp.categorical, num_data=100, check_finite=False)
    x, y = torch.randn(16, 64, device="cuda"), torch.randint(0, 8, (16,), device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            elbo.zero_grad()
            elbo(x, target=y).loss.backward()
    torch.cuda.current_stream().wait_stream(stream)
    elbo.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        elbo(x, target=y).loss.backward()
    gradients = []
    for _ in range(2):
        graph.replay()
        gradients.append((layer.weight.grad.clone(), layer.weight_logit.grad.clone()))
    assert all(g.isfinite().all() and g.any() for pair in gradients for g in pair)
    assert not torch.equal(gradients[0][0], gradients[1][0])
    assert not torch.equal(gradients[0][1], gradients[1][1])


@pytest.mark.parametrize("method", ["none", "dropconnect++"])
def test_the_command_trains_in_a_process_that_has_done_nothing_else(method: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from dropconnectpp.lab.cli.main import main; main()", "run", "table1"]
    options = f"--dataset fashion-mini --methods {method} --repeats 2 --epochs 1 --step-size 0.005 --device cuda"
    command += [*options.split(), "--out", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "Convolutions go through plain PyTorch" not in found.stdout + found.stderr
    assert (tmp_path / "index.html").is_file()
