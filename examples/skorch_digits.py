"""skorch: a net whose training step is the ELBO's, with a plan that steps after each minibatch."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier
from skorch.dataset import unpack_data
from torch import nn

import dropconnectpp as dcpp


class DropConnectNet(NeuralNetClassifier):
    """Predictions are the mean network's, as in any net of skorch."""

    def initialize_module(self) -> NeuralNetClassifier:
        super().initialize_module()
        self.elbo_ = dcpp.ELBO(self.module_, dcpp.categorical, num_data=1200)
        self.plan_ = dcpp.SparsityPlan(self.elbo_, steps=40 * 24, keep=0.2)
        return self

    def train_step_single(self, batch: object, **fit_params: object) -> dict[str, torch.Tensor]:
        self._set_training(True)
        terms = self.elbo_(*unpack_data(batch))
        terms.loss.backward()
        return {"loss": terms.loss, "y_pred": terms.output}

    def on_batch_end(self, net: object, training: bool = False, **options: object) -> None:
        if training:
            self.plan_.step()


torch.manual_seed(0)
model = dcpp.convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), preset="sparse")
x, y = load_digits(return_X_y=True)
x = (x / 16.0).astype(np.float32)
options = {"optimizer": torch.optim.Adam, "lr": 5e-3, "max_epochs": 40, "batch_size": 50, "train_split": None}
net = DropConnectNet(model, criterion=nn.CrossEntropyLoss, verbose=0, **options).fit(x[:1200], y[:1200])
print(f"{net.score(x[1200:], y[1200:]):.1%} right, with {net.plan_.share_kept:.0%} of the weights")
