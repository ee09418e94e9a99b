"""One network in several processes: DistributedDataParallel or FSDP2, started by torchrun.

    torchrun --nproc-per-node 2 examples/several_processes.py
    torchrun --nproc-per-node 2 examples/several_processes.py --fsdp

Each process has its own images and draws its own masks; gradients are averaged, and the KL counts once.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dropconnectpp as dcpp

BATCH = 64
"""Of each process."""


def digits(device: torch.device) -> list[Tensor]:
    """1,797 handwritten digits of 8x8 pixels, one third held out; the same split in every process."""
    data = load_digits()
    split = train_test_split(data.data / 16.0, data.target, test_size=1 / 3, random_state=0, stratify=data.target)
    x_train, x_test, y_train, y_test = (torch.as_tensor(part).to(device) for part in split)
    return [x_train.float(), x_test.float(), y_train, y_test]


def gathered(value: Tensor) -> list[Tensor]:
    """A tensor of each process."""
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value.contiguous())
    return found


def main() -> None:
    """Train, and say what the processes share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp", action="store_true", help="shard parameters by FSDP2 instead of copying them")
    parser.add_argument("--epochs", type=int, default=40, help="passes over the training images (default: 40)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, which tells each process its rank")

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda" if gpu else "cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    x, x_test, y, y_test = digits(device)

    torch.manual_seed(0)  # the same start everywhere
    model = dcpp.convert(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))).to(device)
    if options.fsdp:
        fully_shard(model)  # as a whole
    elbo: nn.Module = dcpp.ELBO(model, dcpp.categorical, num_data=len(x))  # of all processes together
    called = elbo if options.fsdp else DistributedDataParallel(elbo)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    torch.manual_seed(1 + rank)  # other masks in each process
    order = torch.Generator().manual_seed(0)  # and one order of images, of which each takes its part
    for _ in range(options.epochs):
        for rows in torch.randperm(len(x), generator=order).split(BATCH * processes):
            mine = rows[rank::processes]
            optimizer.zero_grad()
            called(x[mine], target=y[mine]).loss.backward()
            optimizer.step()

    with torch.no_grad():
        terms = called(x[:100], target=y[:100])  # still in training mode: one draw of masks in each process
        outputs, kls = gathered(terms.output), gathered(terms.kl.float())
        right = (model.eval()(x_test).argmax(1) == y_test).double().mean()
    if rank == 0:
        differ = [bool((one != outputs[0]).any()) for one in outputs[1:]]
        print(f"{processes} processes, {'FSDP2' if options.fsdp else 'DistributedDataParallel'}, {device.type}")
        print(f"{100 * float(right):.1f}% of {len(x_test)} test images right")
        print(f"outputs under masks of their own: {'all differ' if all(differ) else 'some are the same'}")
        print("KL in each process, nats:", ", ".join(f"{float(kl):.1f}" for kl in kls))
    del called  # before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
