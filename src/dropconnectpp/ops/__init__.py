"""Operations on synapses: the masked weight, the pass over the posterior, and their GPU kernels."""
