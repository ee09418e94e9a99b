"""The Triton kernels behind `synapses`: imported only where Triton is installed.

Each program takes some blocks of one replica's synapses, four to a block; replicas lie along the grid's second axis.
The table's columns are those of `synapses.COLUMNS`, by number. Arguments without `_ptr` are records of `arguments`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dropconnectpp.lab.kernels.gates_triton import unit_interval


# Without annotations: the compiler takes every one for a name that the kernel uses.
@triton.jit
def sigmoid_of(x):  # type: ignore[no-untyped-def]
    """1 / (1 + e^-x), without overflow."""
    decay = tl.exp(-tl.abs(x))
    return tl.where(x < 0, decay, 1.0) / (1.0 + decay)


@triton.jit
def digamma_of(x):  # type: ignore[no-untyped-def]
    """psi(x) for x > 0: up to 6 by its recurrence, then by its asymptotic series."""
    total = x * 0.0
    for _ in tl.static_range(6):
        low = x < 6.0
        total -= tl.where(low, 1.0 / x, 0.0)
        x = tl.where(low, x + 1.0, x)
    inverse = 1.0 / x
    square = inverse * inverse
    series = square * (1.0 / 12.0 - square * (1.0 / 120.0 - square * (1.0 / 252.0)))
    return total + tl.log(x) - 0.5 * inverse - series


@triton.jit
def concrete_of(gate, noise, temperature):  # type: ignore[no-untyped-def]
    """sigmoid((logit u + log alpha) / temperature)."""
    u = noise + 2.9802322387695312e-08
    return sigmoid_of((tl.log(u) - tl.log(1.0 - u) + gate) / temperature)


@triton.jit
def bit_of(mask_ptr, row, places, count):  # type: ignore[no-untyped-def]
    """Whether places of a replica are on, by `bits.pack`."""
    bits = tl.load(mask_ptr + row.to(tl.int64) * ((count + 7) // 8) + places // 8, mask=places < count, other=0)
    return ((bits.to(tl.int32) >> (places % 8)) & 1) > 0


@triton.jit
def keep_of(gate, now):  # type: ignore[no-untyped-def]
    """`synapses.bernoulli_keep`."""
    keep, fixed, least = tl.load(now + 5), tl.load(now + 6), tl.load(now + 12)
    return tl.where(fixed > 0, tl.where(gate > least, keep, 0.0), sigmoid_of(gate))


@triton.jit
def adam_change(first, second, size, correction1, correction2, epsilon):  # type: ignore[no-untyped-def]
    """How far Adam goes."""
    return size * (first / correction1) / (tl.sqrt(second / correction2) + epsilon)


@triton.jit  # type: ignore[untyped-decorator]
def draw_kernel(  # type: ignore[no-untyped-def]
    weight_ptr,
    gate_ptr,
    mask_ptr,
    now_ptr,
    draws,
    out_ptr,
    count,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
    NOISY: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`synapses.draw`."""
    row = tl.program_id(1)
    first = tl.program_id(0) * BLOCK
    places = first * 4 + tl.arange(0, 4 * BLOCK)
    inside = places < count
    offsets = row.to(tl.int64) * count + places
    now = now_ptr + row * WIDTH
    weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0)
    if KIND == "bernoulli" or KIND == "hard-concrete" or NOISY:
        replica = tl.load(draws.replica + row).to(tl.int32)
        step = tl.load(draws.step).to(tl.int32)
        noise = unit_interval(draws.seed, first + tl.arange(0, BLOCK), 0, step, replica)
    result = weight
    if KIND == "mask":
        if MASKED:
            result = tl.where(bit_of(mask_ptr, row, places, count), result, 0.0)
        if NOISY:
            result = tl.where(noise < tl.load(now + 5), result, 0.0)
    if KIND == "bernoulli":
        gate = tl.load(gate_ptr + offsets, mask=inside, other=0.0)
        result = tl.where(noise < keep_of(gate, now), result, 0.0)
    if KIND == "hard-concrete":
        gate = tl.load(gate_ptr + offsets, mask=inside, other=0.0)
        stretch = tl.load(now + 10)
        z = concrete_of(gate, noise, tl.load(now + 9)) * (1.0 + 2.0 * stretch) - stretch
        result = weight * tl.minimum(tl.maximum(z, 0.0), 1.0)
    if KIND == "variance":
        gate = tl.load(gate_ptr + offsets, mask=inside, other=0.0)
        square = weight * weight
        log_alpha = tl.minimum(tl.maximum(gate - tl.log(square + 1e-8), -10.0), 10.0)
        result = tl.exp(log_alpha) * square
    tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def update_kernel(  # type: ignore[no-untyped-def]
    weights,
    gates,
    mask_ptr,
    grad_ptr,
    variance_ptr,
    now_ptr,
    draws,
    rule,
    count,
    RULE: tl.constexpr,
    INSIDE: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
    NOISY: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`synapses.update`."""
    row = tl.program_id(1)
    begin = tl.program_id(0) * BLOCK
    places = begin * 4 + tl.arange(0, 4 * BLOCK)
    inside = places < count
    offsets = row.to(tl.int64) * count + places
    now = now_ptr + row * WIDTH
    weight = tl.load(weights.value + offsets, mask=inside, other=0.0)
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if KIND == "bernoulli" or KIND == "hard-concrete" or NOISY:
        replica = tl.load(draws.replica + row).to(tl.int32)
        step = tl.load(draws.step).to(tl.int32)
        noise = unit_interval(draws.seed, begin + tl.arange(0, BLOCK), 0, step, replica)
    grad_weight = grad
    correction1, correction2 = tl.load(now + 3), tl.load(now + 4)
    if KIND == "mask":
        if MASKED:
            grad_weight = tl.where(bit_of(mask_ptr, row, places, count), grad_weight, 0.0)
        if NOISY:
            grad_weight = tl.where(noise < tl.load(now + 5), grad_weight, 0.0)
    if KIND == "bernoulli" or KIND == "variance" or KIND == "hard-concrete":
        gate = tl.load(gates.value + offsets, mask=inside, other=0.0)
        kl, fixed = tl.load(now + 2), tl.load(now + 6)
        if KIND == "bernoulli":
            alpha, beta = tl.load(now + 7), tl.load(now + 8)
            grad_weight = tl.where(noise < keep_of(gate, now), grad, 0.0)
            p = sigmoid_of(gate)
            prior = gate * 0.0 + alpha
            if beta > 0:
                prior = digamma_of(alpha + p) - digamma_of(beta + 1.0 - p)
            grad_gate = p * sigmoid_of(-gate) * (grad * weight + kl * (gate - prior))
        elif KIND == "hard-concrete":
            temperature, stretch = tl.load(now + 9), tl.load(now + 10)
            s = concrete_of(gate, noise, temperature)
            z = s * (1.0 + 2.0 * stretch) - stretch
            grad_weight = grad * tl.minimum(tl.maximum(z, 0.0), 1.0)
            rise = (1.0 + 2.0 * stretch) * s * (1.0 - s) / temperature
            q = sigmoid_of(gate - temperature * tl.log(stretch / (1.0 + stretch)))
            grad_gate = tl.where((z > 0.0) & (z < 1.0), grad * weight * rise, 0.0) + kl * q * (1.0 - q)
        else:
            grad_variance = tl.load(variance_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            square = weight * weight
            free = gate - tl.log(square + 1e-8)
            log_alpha = tl.minimum(tl.maximum(free, -10.0), 10.0)
            within = tl.where(free == log_alpha, 1.0, 0.0)
            alpha = tl.exp(log_alpha)
            share = within / (square + 1e-8)
            q = sigmoid_of(1.87320 + 1.48695 * log_alpha)
            rise = -(0.63576 * 1.48695 * q * (1.0 - q) + 0.5 * sigmoid_of(-log_alpha)) * kl
            grad_weight = grad + 2.0 * weight * (grad_variance * alpha * (1.0 - square * share) - rise * share)
            grad_gate = within * (grad_variance * alpha * square + rise)
        if fixed <= 0:  # gates and their moments stay as they are once the support is fixed
            one = tl.load(gates.first + offsets, mask=inside, other=0.0)
            two = tl.load(gates.second + offsets, mask=inside, other=0.0)
            one += 0.1 * (grad_gate - one)
            two += 0.001 * (grad_gate * grad_gate - two)
            gate -= adam_change(one, two, tl.load(now + 1), correction1, correction2, rule.gate_epsilon)
            if KIND == "bernoulli":
                gate = tl.minimum(gate, tl.load(now + 11))
            tl.store(gates.value + offsets, gate, mask=inside)
            tl.store(gates.first + offsets, one, mask=inside)
            tl.store(gates.second + offsets, two, mask=inside)
    lr = tl.load(now + 0)
    if RULE == "adam":
        one = tl.load(weights.first + offsets, mask=inside, other=0.0)
        two = tl.load(weights.second + offsets, mask=inside, other=0.0)
        one += 0.1 * (grad_weight - one)
        two += 0.001 * (grad_weight * grad_weight - two)
        weight -= adam_change(one, two, lr, correction1, correction2, 1e-8)
        tl.store(weights.first + offsets, one, mask=inside)
        tl.store(weights.second + offsets, two, mask=inside)
    elif RULE == "sgd":
        one = tl.load(weights.first + offsets, mask=inside, other=0.0) * rule.momentum + grad_weight
        weight -= lr * one
        tl.store(weights.first + offsets, one, mask=inside)
    else:
        two = tl.load(weights.second + offsets, mask=inside, other=1.0) + grad_weight * grad_weight
        root = tl.sqrt(two + rule.epsilon) if INSIDE else tl.sqrt(two) + rule.epsilon
        weight -= lr * grad_weight / root
        tl.store(weights.second + offsets, two, mask=inside)
    tl.store(weights.value + offsets, weight, mask=inside)
