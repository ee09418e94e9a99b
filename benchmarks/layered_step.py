"""What a training step of networks given as layers costs: microseconds a step, and a step and network, by method.

    python benchmarks/layered_step.py                                   # both networks, every method, 20 at once
    python benchmarks/layered_step.py --networks lenet-300-100 --replicas 20,100 --methods "plan;gradual"
    python benchmarks/layered_step.py --networks paper-dense --precision mixed   # gates on the paper's dense layer

The methods are timed in turn, round after round; medians are shown. Images are made up, so that no data set is needed.
For the paper's network the first rows are those of `Stack`, which trains it without gates that can be removed: what
DropConnect and DropConnect++ cost there is what the methods that remove connections compare with.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import cache

import numpy as np
import torch

from dropconnectpp.lab import device as devices
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Architecture, Protocol, Training
from dropconnectpp.lab.config.pruning import L0, GradualMagnitude, Plan, Pruning, SparseVD
from dropconnectpp.lab.data.dataset import Dataset, Provenance, Split
from dropconnectpp.lab.replicas.layered_stack import LayeredStack
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.replicas.stack import Stack, fast_products

METHODS: dict[str, Method | Pruning] = {
    "none": Method(kind="none"),
    "dropconnect": Method(kind="dropconnect", rate=0.2),
    "dropout": Method(kind="dropout", rate=0.2),
    "gradual": GradualMagnitude(keep=0.02),
    "gradual + noise": GradualMagnitude(keep=0.02, noise="dropconnect", rate=0.2),
    "gradual + dropout": GradualMagnitude(keep=0.02, noise="dropout", rate=0.2),
    "plan": Plan(keep=0.02),
    "plan + noise": Plan(keep=0.02, noise=0.5),
    "plan, optimal": Plan(keep=0.02, hyper="optimal"),
    "groups": Plan(price=1.0, granularity="input"),
    "sparse vd": SparseVD(),
    "l0": L0(),
}
NETWORKS = ("lenet-300-100", "lenet-5-caffe")
PAPER = {"paper-dense": 64, "paper-dense-512": 512}
"""Units of the paper's dense layer, by network."""
OF_THE_PAPER = {
    "dropconnect, Stack": Method(kind="dropconnect", rate=0.5),
    "dropconnect++, Stack": Method(kind="dropconnect++", hyper="optimal"),
}
IMAGES = 60_000


@cache
def images(shape: tuple[int, int, int]) -> Dataset:
    """Noise in the shape of MNIST or CIFAR-10."""
    random = np.random.default_rng(0)
    train, test = (
        Split(random.integers(0, 256, (count, *shape), dtype=np.uint8), np.arange(count) % 10)
        for count in (IMAGES, 1000)
    )
    return Dataset("noise", train, test, tuple("0123456789"), "", "", Provenance("made up", verified=False))


def stack_of(network: str, method: Method | Pruning, replicas: int, settings: argparse.Namespace) -> LayeredStack:
    """A stack of one method, ready for its first step."""
    changed = {"method": method} if isinstance(method, Method) else {"pruning": method}
    protocol = Protocol(
        data="noise",
        architecture=Architecture(name=network),
        training=Training(step_size=1e-3, optimiser="adam", schedule="second-half", batch_size=settings.batch),
        precision=settings.precision,
        **changed,
    )
    shape = (3, 32, 32) if network.startswith("paper") else (1, 28, 28)
    stack = LayeredStack([Unit(protocol, r) for r in range(replicas)], images(shape), settings.device)
    stack.shuffle()
    return stack


def stack_of_the_paper(network: str, method: Method, replicas: int, settings: argparse.Namespace) -> Stack:
    """A stack of the paper's networks without the sparsity plan."""
    training = Training(step_size=0.01, batch_size=settings.batch)
    architecture = Architecture(hidden=PAPER[network])
    protocol = Protocol(
        data="noise", architecture=architecture, training=training, method=method, precision=settings.precision
    )
    stack = Stack([Unit(protocol, r) for r in range(replicas)], images((3, 32, 32)), settings.device)
    stack.shuffle()
    return stack


def seconds_of(stack: Stack | LayeredStack, steps: int) -> float:
    """Of a step, on average over some."""
    stack.position.zero_()
    own = (stack.protocol.training.batch_size,) if isinstance(stack, Stack) else ()
    with fast_products(stack.device, stack.dtype):
        begun = time.perf_counter()
        for _ in range(steps):
            stack._run_step(*own)
        if stack.device.type == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - begun) / steps


def main() -> None:
    """Time what is asked for and print a table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--networks", default=",".join(NETWORKS), help="separated by commas")
    arguments.add_argument("--methods", default=";".join(METHODS), help="separated by semicolons")
    arguments.add_argument("--replicas", default="20", help="networks at once, separated by commas")
    arguments.add_argument("--batch", type=int, default=128, help="images in a minibatch")
    arguments.add_argument("--steps", type=int, default=200, help="steps of each measurement")
    arguments.add_argument(
        "--rounds", type=int, default=5, help="measurements of each stack, in turn; the median counts"
    )
    arguments.add_argument("--precision", default="float32", choices=("mixed", "float32"), help="of the products")
    arguments.add_argument("--device", type=devices.choose, default="auto", help="auto, cpu, cuda or cuda:N")
    settings = arguments.parse_args()
    print(
        f"{devices.describe(settings.device)}, torch {torch.__version__}, batch {settings.batch}, {settings.precision}"
    )
    print(f"{'network':<16}{'method':<22}{'networks':>9}{'us/step':>10}{'us/step/network':>17}")
    for network in settings.networks.split(","):
        for replicas in map(int, settings.replicas.split(",")):
            stacks: dict[str, Stack | LayeredStack] = {
                name: stack_of_the_paper(network, method, replicas, settings)
                for name, method in (OF_THE_PAPER if network in PAPER else {}).items()
            }
            stacks |= {m: stack_of(network, METHODS[m], replicas, settings) for m in settings.methods.split(";")}
            for stack in stacks.values():
                seconds_of(stack, 6)  # compiled, and captured in a graph
            found: dict[str, list[float]] = {name: [] for name in stacks}
            for _ in range(settings.rounds):
                for name, stack in stacks.items():
                    found[name].append(seconds_of(stack, settings.steps))
            for name, times in found.items():
                step = 1e6 * statistics.median(times)
                print(f"{network:<16}{name:<22}{replicas:>9}{step:>10.0f}{step / replicas:>17.1f}", flush=True)
            del stacks, stack


if __name__ == "__main__":
    main()
