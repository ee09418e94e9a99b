"""How a card runs the kernels of the dense layer fastest."""
