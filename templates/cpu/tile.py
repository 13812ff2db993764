"""Shared steps of the CPU programs: the language's operations on tensors, and one softmax step.

A rendered program gets copies of those that it calls. FLOAT is the program's float type; ints are
int64. Operands may be Python numbers where the user wrote literals.
"""

import torch

FLOAT = torch.float32


def as_float(x):
    """A number in FLOAT at once: as a tensor of its own it would be float32 first."""
    return x.to(FLOAT) if isinstance(x, torch.Tensor) else torch.as_tensor(x, dtype=FLOAT)


def as_int(x):
    return torch.as_tensor(x).to(torch.int64)


def as_bool(x):
    return torch.as_tensor(x) != 0


def to_int(x):
    """A float without fraction as int64: nan gives 0, out of range saturates."""
    low, high = x <= -(2.0**63), x >= 2.0**63
    inside = torch.where(low | high | x.isnan(), 0.0, x).to(torch.int64)
    return torch.where(low, -(2**63), torch.where(high, 2**63 - 1, inside))


def operand(x):
    """A literal as a tensor."""
    if isinstance(x, torch.Tensor):
        return x
    return as_float(x) if isinstance(x, float) else torch.tensor(x)


def where(condition, x, y):
    return torch.where(operand(condition), operand(x), operand(y))


def minimum(x, y):
    return torch.minimum(operand(x), operand(y))


def maximum(x, y):
    return torch.maximum(operand(x), operand(y))


def bitwise_xor(x, y):
    return torch.bitwise_xor(operand(x), operand(y))


def logical_not(x):
    return torch.logical_not(operand(x))


def divide(x, y):
    return operand(x) / operand(y)


def floor_divide(x, y):
    """Floor division; x // 0 is 0, and the smallest int // -1 wraps."""
    x, y = operand(x), operand(y)
    if x.is_floating_point():
        quotient = torch.floor_divide(x, torch.where(y == 0, 1, y))
        return torch.where(y == 0, 0.0, quotient)
    quotient = torch.floor_divide(x, torch.where((y == 0) | (y == -1), 1, y))
    return torch.where(y == 0, 0, torch.where(y == -1, -x, quotient))


def remainder(x, y):
    """Remainder with the divisor's sign; x % 0 is 0."""
    x, y = operand(x), operand(y)
    if x.is_floating_point():
        return torch.where(y == 0, 0.0, torch.remainder(x, torch.where(y == 0, 1, y)))
    return torch.where(y == 0, 0, torch.remainder(x, torch.where((y == 0) | (y == -1), 1, y)))


def power(x, y):
    return torch.pow(operand(x), operand(y))


def shift_left(x, n):
    """x << n; 0 for n outside 0..63."""
    x, n = operand(x), operand(n)
    valid = (n >= 0) & (n < 64)
    return torch.where(valid, x << torch.where(valid, n, 0), 0)


def shift_right(x, n):
    """x >> n, keeping the sign; 0 for n outside 0..63."""
    x, n = operand(x), operand(n)
    valid = (n >= 0) & (n < 64)
    return torch.where(valid, x >> torch.where(valid, n, 0), 0)


def ilog2(x):
    """floor(log2(x)), exact; 0 for x < 1."""
    x = operand(x)
    result = torch.zeros_like(x)
    for bit in (32, 16, 8, 4, 2, 1):
        big = x >= 1 << bit
        result, x = torch.where(big, result + bit, result), torch.where(big, x >> bit, x)
    return result


def softplus(x):
    return torch.logaddexp(x, torch.zeros_like(x))


def load(table, *indices):
    """table[indices]; 0 where an index lies outside the table, which is then not touched."""
    indices = [operand(x) for x in indices]
    if table.numel() == 0:
        value = table.new_zeros(torch.broadcast_shapes(*(x.shape for x in indices)))
    else:
        inside, safe = torch.tensor(True), []
        for x, length in zip(indices, table.shape, strict=True):
            valid = (x >= 0) & (x < length)
            inside = inside & valid
            safe.append(torch.where(valid, x, 0))
        value = table[tuple(safe)]
        value = torch.where(inside, value, torch.zeros((), dtype=table.dtype))
    if table.dtype == torch.bool:
        return value
    return value.to(FLOAT if table.is_floating_point() else torch.int64)


def listed(blocks, rows, columns):
    """Whether the user's list of blocks holds the pairs: [B, Hk, G, rows, columns]."""
    allowed, block_m, block_n = blocks
    return allowed[..., (rows // block_m)[:, None], columns // block_n]


def online_softmax(m_i, l_i, acc, s, v):
    """Add one tile of scores to the running maximum, sum and weighted values of each row."""
    m_new = torch.maximum(m_i, s.amax(-1, keepdim=True))
    # A row may be fully masked so far: then m_new is -inf, and -inf - -inf would be nan.
    m_safe = torch.where(m_new == -torch.inf, 0.0, m_new)
    p = torch.exp(s - m_safe)
    alpha = torch.exp(m_i - m_safe)
    return m_new, l_i * alpha + p.sum(-1, keepdim=True), acc * alpha + weighted(p, v)


def weighted(p, v):
    """p @ v, one product for the query heads of a kv head: [B, Hk, G, M, N] @ [B, Hk, N, Dv]."""
    batch, heads, group, m, n = p.shape
    return (p.reshape(batch, heads, group * m, n) @ v).view(batch, heads, group, m, -1)


def scores(q, k):
    """q @ k^T for the query heads of a kv head: [B, Hk, G, M, D] @ [B, Hk, N, D]^T."""
    batch, heads, group, m, d = q.shape
    return (q.reshape(batch, heads, group * m, d) @ k.mT).view(batch, heads, group, m, -1)


def over_queries(p, x):
    """p^T @ x, summed over the query heads of a kv head: [B, Hk, G, M, N]^T @ [B, Hk, G, M, D]."""
    batch, heads, group, m, n = p.shape
    return p.reshape(batch, heads, group * m, n).mT @ x.reshape(batch, heads, group * m, -1)


def chained(gradient, slope):
    """gradient * slope, and 0 where nothing arrives: there the slope may be nan or infinite."""
    return torch.where(gradient == 0, 0.0, gradient * as_float(slope))


def add_at(gradient, table, value, *indices):
    """Add each value to the gradient of table[indices]; reads outside the table have none.

    A dimension in which the gradient has length 1 is one that the table only repeats.
    """
    if gradient.numel() == 0:
        return
    inside, place = torch.tensor(True), torch.tensor(0)
    for x, length, own in zip(indices, table.shape, gradient.shape, strict=True):
        x = operand(x)
        valid = (x >= 0) & (x < length)
        inside = inside & valid
        place = place * own + (torch.where(valid, x, 0) if own > 1 else torch.zeros_like(x))
    # Pairs that read one element are summed first; index_add_ adds the rest in order.
    value = torch.where(inside, value, 0.0).sum_to_size(place.shape)
    gradient.view(-1).index_add_(0, place.flatten(), value.flatten())
