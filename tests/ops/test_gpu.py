"""The GPU kernels: interpreted and compiled for a card on the CPU, and run on a GPU where there is one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gate_cases import compare_examples, compare_gating, compare_noise, compare_posterior

import dropconnectpp as dcpp
from dropconnectpp.ops import gpu, posterior
from dropconnectpp.ops.prior import Prior

INTERPRETED = """
import torch
from dropconnectpp.ops import gpu, gpu_examples
from gate_cases import compare_examples, compare_gating, compare_noise, compare_posterior

torch.manual_seed(0)
cpu = torch.device("cpu")
gpu.WORDS, gpu.WIDE_WORDS = 16, 32
for count in (1, 64, 65):
    compare_noise(count, cpu)
    compare_gating(count, cpu, torch.float16)
for count in (1, 129):
    compare_posterior(count, cpu)
gpu_examples.HEIGHT, gpu_examples.WIDTH = 4, 16
for sizes in ((1, 1, 1), (3, 5, 17), (2, 4, 32)):
    compare_examples(*sizes, cpu)
print("all well")
"""


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dropconnectpp.ops import gpu_examples_triton, gpu_gates_triton, gpu_triton

SIZES = ("count", "weights", "biases", "layers", "rows", "columns", "examples", "outs", "ins")
INTEGERS = ("stream", "row", "first", "place", "index", *SIZES)
POINTERS = {"seed_ptr": "*i64", "seeds_ptr": "*i64", "rows_ptr": "*i64", "mask_ptr": "*u8"}
BLOCK = {"WORDS": 256}
HOMES = (gpu_triton, gpu_gates_triton, gpu_examples_triton)
KINDS = (("uniform", 11), ("marginal", 3), ("any", 24))

def build(name, constants, **types):
    kernel = next(found for home in HOMES if (found := vars(home).get(name)))
    signature = {}
    for argument in kernel.arg_names:
        kept = "*u8" if argument.endswith("kept_ptr") else "*fp32" if argument.endswith("_ptr") else "fp32"
        usual = POINTERS.get(argument, "i32" if argument.endswith(INTEGERS) else kept)
        signature[argument] = "constexpr" if argument in constants else types.get(argument, usual)
    places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    triton.compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32))
    built.add(name)

built = set()
build("uniform_kernel", BLOCK)
build("normal_kernel", BLOCK)
build("masking_kernel", BLOCK)
build("binary_kernel", {"SCALAR": True, "MIRRORED": False, **BLOCK}, out_ptr="*u8")
build("settle_kernel", {"IN_PLACE": True, "BLOCK": 1024})
tile = {"KEPT": True, "MIRRORED": False, "HEIGHT": 16, "WIDTH": 64}
build("example_uniform_kernel", {"HEIGHT": 16, "WIDTH": 64})
build("example_product_kernel", tile, input_ptr="*bf16", out_ptr="*bf16")
build("example_input_kernel", tile, grad_ptr="*bf16", out_ptr="*bf16")
build("example_weight_kernel", {"THROUGH": True, **tile}, input_ptr="*bf16", grad_ptr="*bf16")
build("example_sum_kernel", {"SUMS": 3, "ROOM": 4, **tile})
layer = {"SCALAR": False, "BIAS": True, "WEIGHT_KEPT": True, "BIAS_KEPT": False, "MIRRORED": True}
for kind, count in (("marginal", 3), ("none", 1)):  # the posterior's kernels have the other kinds
    numbers = ("fp32",) * count
    tally = {"KIND": kind, "SCORED": kind == "marginal"}
    out = {"weight_out_ptr": "*bf16", "bias_out_ptr": "*bf16", "weight_grad_ptr": "*bf16", "bias_grad_ptr": "*bf16"}
    build("gates_kernel", {**layer, **tally, **BLOCK}, numbers=numbers, **out)
    wanted = {"WEIGHT": True, "THROUGH": kind != "marginal"}
    build("gates_backward_kernel", {**layer, **tally, **wanted, **BLOCK}, numbers=numbers, **out)
for kind, count in KINDS:
    numbers = ("fp32",) * count
    build("posterior_kernel", {"KIND": kind, "KEPT": True, "SAMPLES": 2, **BLOCK}, numbers=numbers)
    switches = {"SCALE_IS_POINTER": False, "KEPT": True, "SAMPLES": 2, "PAIRED": True}
    build("posterior_backward_kernel", {"KIND": kind, **switches, **BLOCK}, numbers=numbers)
there = {name for module in HOMES for name in vars(module) if name.endswith("_kernel")}
assert built == there, built ^ there
print("all well")
"""


@pytest.mark.triton
def test_every_kernel_compiles_for_hopper(run_compiled: Callable[..., str]) -> None:
    assert run_compiled(COMPILED).strip() == "all well"


@pytest.mark.triton
def test_the_interpreted_kernels_are_their_definitions(run_interpreted: Callable[..., None]) -> None:
    run_interpreted(INTERPRETED)


def test_the_cpu_never_takes_a_kernel() -> None:
    assert not gpu.supported(torch.ones(3))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 1000, 2**20 + 3])
def test_the_kernels_are_their_definitions_on_a_gpu(count: int) -> None:
    torch.manual_seed(count)
    device = torch.device("cuda")
    compare_noise(count, device)
    compare_gating(count, device, torch.bfloat16)
    compare_posterior(count, device)


@pytest.mark.gpu
def test_a_mask_for_each_example_is_its_definition_on_a_gpu() -> None:
    for sizes in ((1, 1, 1), (5, 33, 70), (128, 64, 512)):
        compare_examples(*sizes, torch.device("cuda"))


@pytest.mark.gpu
def test_masks_come_as_often_as_their_probability() -> None:
    logit = torch.linspace(-6.0, 6.0, 2**22, device="cuda")
    seeds = torch.arange(16, device="cuda")
    mean = sum(gpu.binary(logit, logit.shape, seed, 0, False).double().sum() for seed in seeds)
    pi = torch.sigmoid(logit.double())
    z = (mean - 16 * pi.sum()) / (16 * (pi * (1 - pi)).sum()).sqrt()
    assert abs(float(z)) < 5


@pytest.mark.gpu
def test_a_layer_takes_the_kernels_where_it_can() -> None:
    def taken(**options: Any) -> bool:
        layer = dcpp.DropConnectPPLinear(30, 20, device="cuda", **options)
        return posterior.drawn_scores_supported(layer.posterior_of("weight"), ())

    assert taken()
    assert taken(hyper="optimal", alpha=10.0, beta=90.0)
    assert not taken(dtype=torch.float64)
    assert not taken(hyper="learned")
    assert not taken(parameterisation="probability")
    assert not taken(hyper="optimal", sharing="unit")
    assert not taken(hyper="optimal", alpha=0.1, beta=1.0)


def test_every_prior_says_whether_kernels_have_its_kl() -> None:
    kinds = {prior: found and found[0] for prior in PRIORS for found in [gpu.kl_numbers(prior)]}
    assert kinds == {PRIORS[0]: "marginal", PRIORS[1]: "uniform", PRIORS[2]: "any", PRIORS[3]: None}


PRIORS = (
    Prior(1.0, 99.0),
    Prior(1.0, 1.0, "optimal"),
    Prior(10.0, 90.0, "optimal"),
    Prior(0.1, 1.0, "optimal"),
)

ESTIMATORS: list[tuple[Any, str, int]] = [
    (dcpp.estimators.BBVI(), "optimal", 1),
    (dcpp.estimators.BBVI(), "learned", 1),
    (dcpp.estimators.BBVI(per_synapse=True), "optimal", 1),
    (dcpp.estimators.BBVI(baseline="mean-network"), "optimal", 1),
    (dcpp.estimators.BBVI(baseline="leave-one-out"), "optimal", 2),
    ("straight-through", "optimal", 1),
    ("straight-through", "learned", 1),
    ("concrete", "optimal", 1),
    ("disarm", "optimal", 1),
    ("local", "optimal", 1),
    ("eq16", "learned", 1),
]


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["batch", "example"])
@pytest.mark.parametrize(("estimator", "hyper", "num_samples"), ESTIMATORS, ids=str)
def test_a_step_on_the_gpu_is_the_step_on_the_cpu(estimator: Any, hyper: str, num_samples: int, mask: str) -> None:
    """Two ELBO steps with forced masks; the second has a running baseline to subtract."""
    torch.manual_seed(1)
    batch, shapes = 16, {"0.weight": (20, 30), "0.bias": (20,), "1.weight": (5, 20), "1.bias": (5,)}
    options = {"estimator": estimator, "hyper": hyper, "mask": mask}
    start = torch.nn.Sequential(
        dcpp.DropConnectPPLinear(30, 20, activation=torch.nn.ReLU(), **options),
        dcpp.DropConnectPPLinear(20, 5, kl_weight=0.3, **options),
    )
    with torch.no_grad():
        for name, parameter in start.named_parameters():
            if name.endswith("logit"):
                parameter.normal_()
    lead = (batch,) if mask == "example" else ()
    passes = [{name: torch.rand(*lead, *shape) < 0.5 for name, shape in shapes.items()} for _ in range(2)]
    x, y = torch.randn(batch, 30), torch.randint(0, 5, (batch,))
    found = {}
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        model = copy.deepcopy(start).to(device=device, dtype=dtype)
        elbo = dcpp.ELBO(model, dcpp.categorical, num_data=1000, num_samples=num_samples)
        with dcpp.forced_masks(model, passes):
            for _ in range(2):
                model.zero_grad()
                terms = elbo(x.to(device=device, dtype=dtype), target=y.to(device))
                terms.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        values = {"loss": terms.loss.detach(), "kl": terms.kl, **gradients}
        found[device] = {name: value.cpu().double() for name, value in values.items()}
    assert found["cpu"].keys() == found["cuda"].keys()
    for name, value in found["cpu"].items():
        if estimator == "eq16" and name.endswith(("alpha", "beta")):  # scored by a draw of pi: other noise there
            assert bool(torch.isfinite(found["cuda"][name]).all())
        else:
            torch.testing.assert_close(
                found["cuda"][name], value, rtol=2e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
