"""From outputs to a loss: the ELBO and the gradient of the posterior."""
