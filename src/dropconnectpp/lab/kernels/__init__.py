"""Fused GPU kernels for a stack of replicas, each beside the plain-torch twin that defines what it computes."""
