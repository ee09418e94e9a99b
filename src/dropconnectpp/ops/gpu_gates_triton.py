"""The Triton kernels behind `gpu_gates`: a layer's gates, weight and bias in one launch, imported only with Triton.

In a step of training the same launch works out the layer's KL and squared scores on the way forward, and their part of
the logits' gradient on the way back: the logits are in registers there, and so are the masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dropconnectpp.ops.gpu_triton import divergence, gate_of, load_logit, noise_of, places


@triton.jit  # type: ignore[untyped-decorator]
def kept_share(kept_ptr, offsets, inside, KEPT: tl.constexpr):  # type: ignore[no-untyped-def]
    """One where a synapse is there and was not pruned, zero elsewhere."""
    if KEPT:
        return tl.load(kept_ptr + offsets, mask=inside, other=0).to(tl.float32)
    return inside.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def mask_parameter(  # type: ignore[no-untyped-def]
    program,
    weight_ptr,
    logit_ptr,
    kept_ptr,
    out_ptr,
    seed_ptr,
    stream,
    count,
    partial_ptr,
    place,
    spacing,
    numbers,
    KIND: tl.constexpr,
    SCORED: tl.constexpr,
    SCALAR: tl.constexpr,
    KEPT: tl.constexpr,
    MIRRORED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """W z of a program's synapses, in the dtype of the result, and partial sums of their KL and squared scores."""
    offsets, inside = places(program, count, WORDS)
    logit = load_logit(logit_ptr, offsets, inside, SCALAR)
    gate = gate_of(noise_of(program, seed_ptr, stream, WORDS), logit, MIRRORED).to(tl.float32)
    kept = kept_share(kept_ptr, offsets, inside, KEPT)
    weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, weight * gate * kept, mask=inside)
    if KIND != "none":
        kl, _, pi = divergence(logit, numbers, KIND)
        tl.store(partial_ptr + place, tl.sum(kl * kept, axis=0))
        if SCORED:
            score = (gate - pi) * kept
            tl.store(partial_ptr + place + spacing, tl.sum(score * score, axis=0))


# Numbers that differ from layer to layer: each would be compiled anew where it happens to be 1 or a multiple of 16.
@triton.jit(do_not_specialize=["weight_stream", "bias_stream", "place"])  # type: ignore[untyped-decorator]
def gates_kernel(  # type: ignore[no-untyped-def]
    weight_ptr,
    bias_ptr,
    weight_logit_ptr,
    bias_logit_ptr,
    weight_kept_ptr,
    bias_kept_ptr,
    weight_out_ptr,
    bias_out_ptr,
    seed_ptr,
    partial_ptr,
    weight_stream,
    bias_stream,
    weights,
    biases,
    place,
    numbers,
    KIND: tl.constexpr,
    SCORED: tl.constexpr,
    BIAS: tl.constexpr,
    SCALAR: tl.constexpr,
    WEIGHT_KEPT: tl.constexpr,
    BIAS_KEPT: tl.constexpr,
    MIRRORED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The masked weight and, by the programs that follow, the masked bias."""
    program, spacing, first = tl.program_id(0), tl.num_programs(0), tl.cdiv(weights, 4 * WORDS)
    if program < first:
        mask_parameter(
            program,
            weight_ptr,
            weight_logit_ptr,
            weight_kept_ptr,
            weight_out_ptr,
            seed_ptr,
            weight_stream,
            weights,
            partial_ptr,
            place + program,
            spacing,
            numbers,
            KIND,
            SCORED,
            SCALAR,
            WEIGHT_KEPT,
            MIRRORED,
            WORDS,
        )
    elif BIAS:
        mask_parameter(
            program - first,
            bias_ptr,
            bias_logit_ptr,
            bias_kept_ptr,
            bias_out_ptr,
            seed_ptr,
            bias_stream,
            biases,
            partial_ptr,
            place + program,
            spacing,
            numbers,
            KIND,
            SCORED,
            SCALAR,
            BIAS_KEPT,
            MIRRORED,
            WORDS,
        )


@triton.jit  # type: ignore[untyped-decorator]
def differentiate_parameter(  # type: ignore[no-untyped-def]
    program,
    grad_ptr,
    weight_ptr,
    logit_ptr,
    kept_ptr,
    grad_weight_ptr,
    grad_logit_ptr,
    seed_ptr,
    stream,
    count,
    upstream_ptr,
    coefficient_ptr,
    kl_scale,
    numbers,
    WEIGHT: tl.constexpr,
    THROUGH: tl.constexpr,
    KIND: tl.constexpr,
    SCORED: tl.constexpr,
    SCALAR: tl.constexpr,
    KEPT: tl.constexpr,
    MIRRORED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """z G for the weights; for the logits G W pi~ (1 - pi~) straight through, and the gradient of KL and score."""
    offsets, inside = places(program, count, WORDS)
    logit = load_logit(logit_ptr, offsets, inside, SCALAR)
    gate = gate_of(noise_of(program, seed_ptr, stream, WORDS), logit, MIRRORED).to(tl.float32)
    kept = kept_share(kept_ptr, offsets, inside, KEPT)
    if WEIGHT or THROUGH:
        grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if KIND != "none":
        _, gradient, pi = divergence(logit, numbers, KIND)
        gradient *= kl_scale
        if SCORED:
            gradient -= tl.load(coefficient_ptr) * (gate - pi)
        gradient *= tl.load(upstream_ptr).to(tl.float32)
    if THROUGH:
        weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        decay = tl.exp(-tl.abs(logit))
        spread = decay / ((1.0 + decay) * (1.0 + decay))
        if KIND != "none":
            gradient += grad * weight * spread
        else:
            gradient = grad * weight * spread
    if THROUGH or KIND != "none":
        tl.store(grad_logit_ptr + offsets, gradient * kept, mask=inside)
    if WEIGHT:
        tl.store(grad_weight_ptr + offsets, grad * gate * kept, mask=inside)


@triton.jit(do_not_specialize=["weight_stream", "bias_stream", "index"])  # type: ignore[untyped-decorator]
def gates_backward_kernel(  # type: ignore[no-untyped-def]
    weight_grad_ptr,
    bias_grad_ptr,
    weight_ptr,
    bias_ptr,
    weight_logit_ptr,
    bias_logit_ptr,
    weight_kept_ptr,
    bias_kept_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    grad_weight_logit_ptr,
    grad_bias_logit_ptr,
    seed_ptr,
    upstream_ptr,
    coefficient_ptr,
    weight_stream,
    bias_stream,
    weights,
    biases,
    index,
    kl_scale,
    numbers,
    WEIGHT: tl.constexpr,
    THROUGH: tl.constexpr,
    KIND: tl.constexpr,
    SCORED: tl.constexpr,
    BIAS: tl.constexpr,
    SCALAR: tl.constexpr,
    WEIGHT_KEPT: tl.constexpr,
    BIAS_KEPT: tl.constexpr,
    MIRRORED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The gradients of a weight and its logits and, by the programs that follow, of the bias and its logits."""
    program, first = tl.program_id(0), tl.cdiv(weights, 4 * WORDS)
    if program < first:
        differentiate_parameter(
            program,
            weight_grad_ptr,
            weight_ptr,
            weight_logit_ptr,
            weight_kept_ptr,
            grad_weight_ptr,
            grad_weight_logit_ptr,
            seed_ptr,
            weight_stream,
            weights,
            upstream_ptr,
            coefficient_ptr + index,
            kl_scale,
            numbers,
            WEIGHT,
            THROUGH,
            KIND,
            SCORED,
            SCALAR,
            WEIGHT_KEPT,
            MIRRORED,
            WORDS,
        )
    elif BIAS:
        differentiate_parameter(
            program - first,
            bias_grad_ptr,
            bias_ptr,
            bias_logit_ptr,
            bias_kept_ptr,
            grad_bias_ptr,
            grad_bias_logit_ptr,
            seed_ptr,
            bias_stream,
            biases,
            upstream_ptr,
            coefficient_ptr + index,
            kl_scale,
            numbers,
            WEIGHT,
            THROUGH,
            KIND,
            SCORED,
            SCALAR,
            BIAS_KEPT,
            MIRRORED,
            WORDS,
        )


@triton.jit  # type: ignore[untyped-decorator]
def sum_of(partial_ptr, start, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of partial sums that lie one after the other."""
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, count, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + start + offsets, mask=offsets < count, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["layers"])  # type: ignore[untyped-decorator]
def settle_kernel(  # type: ignore[no-untyped-def]
    partial_ptr,
    rows_ptr,
    shares_ptr,
    reward_ptr,
    coefficients_ptr,
    fresh_ptr,
    loss_ptr,
    elbo_ptr,
    log_likelihood_ptr,
    kl_ptr,
    layers,
    scale,
    num_data,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From partial sums to the bound: loss, ELBO, log-likelihood and KL, and each layer's moments and coefficient.

    A layer's row says where its partial sums start, how many there are, where its moments lie (0: it has none) and its
    coefficient; its share, what its KL counts and how slowly its moments move. The reward is an example's mean
    log-likelihood.
    """
    reward = tl.load(reward_ptr).to(tl.float32)
    kl_sum = reward * 0.0
    weighted = reward * 0.0
    for layer in range(layers):
        place = tl.load(rows_ptr + 4 * layer)
        count = tl.load(rows_ptr + 4 * layer + 1).to(tl.int32)
        moments = tl.load(rows_ptr + 4 * layer + 2)
        kl = sum_of(partial_ptr, place, count, BLOCK)
        kl_sum += kl
        weighted += kl * tl.load(shares_ptr + 2 * layer)
        if moments != 0:
            squared = sum_of(partial_ptr, place + count, count, BLOCK)
            moments_ptr = moments.to(tl.pointer_type(tl.float32))
            first, second = tl.load(moments_ptr), tl.load(moments_ptr + 1)
            baseline = tl.where(second > 0, first / second, 0.0)
            tl.store(coefficients_ptr + tl.load(rows_ptr + 4 * layer + 3), tl.where(second > 0, reward - baseline, 0.0))
            decay = tl.load(shares_ptr + 2 * layer + 1)
            target = moments_ptr if IN_PLACE else fresh_ptr + 2 * layer
            tl.store(target, mix(reward * squared, first, decay))
            tl.store(target + 1, mix(squared, second, decay))
    loss = scale * weighted - reward
    tl.store(loss_ptr, loss)
    tl.store(elbo_ptr, -num_data * loss)
    tl.store(log_likelihood_ptr, num_data * reward)
    tl.store(kl_ptr, kl_sum)


@triton.jit
def mix(new, old, decay):  # type: ignore[no-untyped-def]
    """`torch.lerp` from the new to the old value."""
    return tl.where(decay < 0.5, new + decay * (old - new), old - (old - new) * (1.0 - decay))
