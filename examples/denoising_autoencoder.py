"""The generative case: an example is one observation, and the network models it from a noisy copy.

A denoising autoencoder on scikit-learn's digits whose code layer infers its connections. Run it with
`python examples/denoising_autoencoder.py`; it takes about half a minute.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import dropconnectpp as dcpp


def corrupt(x: Tensor, share: float = 0.3) -> Tensor:
    """Switch a share of the pixels off."""
    return x * (torch.rand_like(x) > share)


def main() -> None:
    """Train, then reconstruct digits that were not seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40, help="passes over the training set (default: 40)")
    options = parser.parse_args()
    torch.manual_seed(0)
    pixels = torch.as_tensor(load_digits().data / 16.0).float()
    seen, unseen = pixels[:1400], pixels[1400:]

    model = nn.Sequential(
        dcpp.DropConnectPPLinear(64, 96, activation=nn.ReLU(), estimator="straight-through"), nn.Linear(96, 64)
    )
    elbo = dcpp.ELBO(model, dcpp.bernoulli, num_data=len(seen))
    optimizer = torch.optim.Adagrad(dcpp.parameter_groups(model, lr=0.03, logit_lr=0.1))
    for epoch in range(options.epochs):
        for rows in torch.randperm(len(seen)).split(64):
            terms = elbo(corrupt(seen[rows]), target=seen[rows])
            optimizer.zero_grad()
            terms.loss.backward()
            optimizer.step()
        if (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1:3}  ELBO per image {terms.elbo.item() / len(seen):8.2f} nats")

    noisy = corrupt(unseen)
    mean = dcpp.predict(model, noisy, num_samples=30).mean
    before, after = (noisy - unseen).square().mean().sqrt(), (mean - unseen).square().mean().sqrt()
    print(f"\nUnseen digits: error per pixel {before:.3f} noisy, {after:.3f} reconstructed\n")
    for row in range(8):
        images = [image.view(8, 8)[row] for image in (unseen[3], noisy[3], mean[3])]
        print("    ".join("".join(" .:-=+*#%@"[min(int(v * 10), 9)] * 2 for v in part) for part in images))
    print(f"{'original':<20}{'noisy':<20}reconstructed\n")
    print(dcpp.posterior(model).summary())


if __name__ == "__main__":
    main()
