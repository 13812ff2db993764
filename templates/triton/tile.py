"""Shared steps of the Triton kernels; a rendered kernel gets copies of those that it calls."""

import triton
import triton.language as tl

# -- reading captured tensors ------------------------------------------------------------------


@triton.jit
def at(index, size, stride):
    """A place along one dimension: (offset, whether it lies inside)."""
    inside = (index >= 0) & (index < size)
    return tl.where(inside, index, 0).to(stride.dtype) * stride, inside


@triton.jit
def read(pointers, inside, NEAR: tl.constexpr):
    """A read from memory; `NEAR` reads float32 that other pairs of the tile read as well.

    Triton would prefetch those through shared memory, element by element, with 36 barriers a tile.
    """
    if NEAR:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.f32 $0, 0f00000000;"
            " @p ld.global.f32 $0, [$1]; }",
            "=f,l,r",
            [pointers.to(tl.int64), inside.to(tl.int32)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.load(pointers, mask=inside, other=0)


@triton.jit
def load_1(table, a, NEAR: tl.constexpr = False):
    """table[a]; 0 outside the table, which is then not touched."""
    return read(table + a[0], a[1], NEAR)


@triton.jit
def load_2(table, a, b, NEAR: tl.constexpr = False):
    """table[a, b]; 0 outside."""
    return read(table + (a[0] + b[0]), a[1] & b[1], NEAR)


@triton.jit
def load_3(table, a, b, c, NEAR: tl.constexpr = False):
    """table[a, b, c]; 0 outside."""
    return read(table + (a[0] + b[0] + c[0]), a[1] & b[1] & c[1], NEAR)


@triton.jit
def load_4(table, a, b, c, d, NEAR: tl.constexpr = False):
    """table[a, b, c, d]; 0 outside."""
    inside = a[1] & b[1] & c[1] & d[1]
    return read(table + (a[0] + b[0] + c[0] + d[0]), inside, NEAR)


@triton.jit
def load_5(table, a, b, c, d, e, NEAR: tl.constexpr = False):
    """table[a, b, c, d, e]; 0 outside."""
    inside = a[1] & b[1] & c[1] & d[1] & e[1]
    return read(table + (a[0] + b[0] + c[0] + d[0] + e[0]), inside, NEAR)


# -- ints --------------------------------------------------------------------------------------


@triton.jit
def to_int64(x):
    return tl.cast(x, tl.int64)


@triton.jit
def floor_divide(x, y):
    """x // y as in Python; x // 0 is 0. The hardware's division truncates."""
    by_zero = y == 0
    y = tl.where(by_zero, 1, y)
    quotient = x // y
    rest = x - quotient * y
    quotient = tl.where((rest != 0) & ((rest < 0) != (y < 0)), quotient - 1, quotient)
    return tl.where(by_zero, 0, quotient)


@triton.jit
def remainder(x, y):
    """x % y with y's sign, as in Python; x % 0 is 0."""
    by_zero = y == 0
    y = tl.where(by_zero, 1, y)
    rest = x - (x // y) * y
    rest = tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)
    return tl.where(by_zero, 0, rest)


@triton.jit
def shift_left(x, n):
    """x << n; 0 for n outside 0..63."""
    valid = (n >= 0) & (n < 64)
    return tl.where(valid, x << tl.where(valid, n, 0), 0)


@triton.jit
def shift_right(x, n):
    """x >> n, keeping the sign; 0 for n outside 0..63."""
    valid = (n >= 0) & (n < 64)
    return tl.where(valid, x >> tl.where(valid, n, 0), 0)


@triton.jit
def ilog2(x):
    """floor(log2(x)), exact; 0 for x < 1."""
    result = x * 0
    for step in tl.static_range(6):
        bit = 32 >> step
        big = (x >> bit) > 0
        result = tl.where(big, result + bit, result)
        x = tl.where(big, x >> bit, x)
    return result


@triton.jit
def int_power(x, N: tl.constexpr):
    """x ** N of an int, modulo 2**64, by squaring."""
    result = x * 0 + 1
    for bit in tl.static_range(63):
        if (N >> bit) > 0:
            if (N >> bit) % 2 == 1:
                result = result * x
            x = x * x
    return result


@triton.jit
def truncate(x):
    """Towards zero, still a float."""
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_half_even(x):
    """To the nearest integer, still a float. Adding 1.5 * 2**23 leaves no bits for a fraction."""
    near = (x + 12582912.0) - 12582912.0
    large = tl.where(tl.abs(x) < 8388608.0, half_even_large(x), x)
    return tl.where(tl.abs(x) < 4194304.0, near, large)


@triton.jit
def half_even_large(x):
    """The same for 2**22 <= |x| < 2**23, where floats have halves."""
    low = tl.floor(x)
    half = low * 0.5
    odd = half != tl.floor(half)
    up = (x - low > 0.5) | ((x - low == 0.5) & odd)
    return tl.where(up, low + 1.0, low)


@triton.jit
def to_int(x):
    """A float without fraction as int64: nan gives 0, out of range saturates."""
    low, high = x <= -9223372036854775808.0, x >= 9223372036854775808.0
    inside = tl.where(low | high | (x != x), 0.0, x).to(tl.int64)
    return tl.where(low, -9223372036854775808, tl.where(high, 9223372036854775807, inside))


# -- floats ------------------------------------------------------------------------------------


@triton.jit
def divide_exact(x, y):
    """The correctly rounded quotient."""
    return tl.div_rn(tl.cast(x, tl.float32), tl.cast(y, tl.float32))


@triton.jit
def floor_divide_float(x, y):
    """x // y of floats as in Python; 0 for y == 0."""
    safe = tl.where(y == 0, 1.0, y)
    return tl.where(y == 0, 0.0, round_half_even((x - remainder_float(x, safe)) / safe))


@triton.jit
def remainder_float(x, y):
    """x % y of floats with y's sign, as in Python; 0 for y == 0."""
    safe = tl.where(y == 0, 1.0, y)
    rest = x % safe
    rest = tl.where((rest != 0) & ((rest < 0) != (safe < 0)), rest + safe, rest)
    return tl.where(y == 0, 0.0, rest)


@triton.jit
def power(x, y):
    """x ** y of floats, by exp2 and log2; a negative x needs an integer y."""
    whole = y == tl.floor(y)
    odd = whole & (y * 0.5 != tl.floor(y * 0.5))
    magnitude = tl.exp2(y * tl.log2(tl.abs(x)))
    signed = tl.where((x < 0) & odd, -magnitude, magnitude)
    value = tl.where((x < 0) & ~whole, float("nan"), signed)
    return tl.where((y == 0) | (x == 1), 1.0, value)


@triton.jit
def exp_exact(x):
    """e ** x to 2 units: exp2 alone would lose |x| units."""
    n = round_half_even(tl.minimum(tl.maximum(x, -126.0), 126.0) * 1.4426950408889634)
    rest = tl.fma(n, -0.693145751953125, x)
    rest = tl.fma(n, -1.428606765330187e-06, rest)
    return tl.exp2(rest * 1.4426950408889634) * tl.exp2(n)


@triton.jit
def expm1(x):
    """exp(x) - 1, accurate near 0 (Kahan)."""
    u = exp_exact(x)
    near = tl.where(u == 1.0, x, (u - 1.0) * x / tl.log(u))
    return tl.where(tl.abs(x) < 1.0, near, u - 1.0)


@triton.jit
def log1p(x):
    """log(1 + x), accurate near 0 (Kahan)."""
    u = 1.0 + x
    value = tl.where(tl.abs(x) < 1.0, tl.log(u) * x / (u - 1.0), tl.log(u))
    return tl.where((u == 1.0) | (u != u), x, value)


@triton.jit
def rsqrt_exact(x):
    return tl.div_rn(1.0 + x * 0, tl.sqrt_rn(x))


@triton.jit
def tanh_hardware(x):
    """The GPU's own tanh, relative error 2**-11."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def tanh_exp2(x):
    """tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    return 1.0 - 2.0 / (tl.exp2(2.8853900817779268 * x) + 1.0)


@triton.jit
def tanh_exact(x):
    """tanh to 2 units: expm1 keeps what 1 - 2 / (...) loses near 0."""
    a = tl.abs(x)
    t = expm1(-2.0 * a)
    value = -t / (2.0 + t)
    return tl.where(x < 0, -value, value)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * x))


@triton.jit
def sigmoid_exact(x):
    e = exp_exact(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) without overflow."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p(exp_exact(-tl.abs(x)))


# -- programs ----------------------------------------------------------------------------------


@triton.jit
def heads_together(program, tiles, heads, TOGETHER: tl.constexpr):
    """The (head, tile) of a program: the first tiles of a few heads, then their next ones."""
    group = program // (TOGETHER * tiles)
    rest = program - group * (TOGETHER * tiles)
    size = tl.minimum(heads - group * TOGETHER, TOGETHER)
    return group * TOGETHER + rest % size, rest // size


# -- kv segments -------------------------------------------------------------------------------


@triton.jit
def visible_tiles(lo, hi, exists, kv_end, BLOCK_N: tl.constexpr):
    """Tiles that some row of the q tile sees: (first, end)."""
    alive = exists & (lo <= hi)
    first = tl.min(tl.where(alive, lo, 2147483647), 0)
    last = tl.minimum(tl.max(tl.where(alive, hi, -1), 0), kv_end - 1)
    some = first <= last
    return tl.where(some, first // BLOCK_N, 0), tl.where(some, last // BLOCK_N + 1, 0)


@triton.jit
def sees_tile(lo, hi, exists, kv_end, tile, BLOCK_N: tl.constexpr):
    """Whether rows of several q tiles, [tiles, BLOCK_M], may see the kv tile that each is given."""
    alive = exists & (lo <= hi)
    first = tl.min(tl.where(alive, lo, 2147483647), 1)
    last = tl.minimum(tl.max(tl.where(alive, hi, -1), 1), kv_end - 1)
    return (first <= last) & (first // BLOCK_N <= tile) & (tile <= last // BLOCK_N)


@triton.jit
def full_tiles(lo, hi, exists, kv_end, first, end, BLOCK_N: tl.constexpr):
    """Tiles that every row sees whole: (first, end), inside the visible ones."""
    full_lo = tl.max(tl.where(exists, lo, 0), 0)
    full_hi = tl.minimum(tl.min(tl.where(exists, hi, 2147483646), 0), kv_end - 1)
    # full_lo may be near 2**31: divide before adding.
    full_first = tl.minimum(tl.maximum(full_lo // BLOCK_N + (full_lo % BLOCK_N != 0), first), end)
    full_end = tl.minimum(tl.maximum((full_hi + 1) // BLOCK_N, full_first), end)
    return full_first, full_end


@triton.jit
def disjoint(first, end, last_end):
    """A run without the tiles of the runs before it: (first, end), empty if none is left."""
    first = tl.maximum(first, last_end)
    return first, tl.maximum(end, first)


@triton.jit
def in_order(a_key, b_key, a_start, a_end, b_start, b_end):
    """Two runs, the one with the smaller key in front."""
    swap = b_key < a_key
    return (
        tl.where(swap, b_start, a_start),
        tl.where(swap, b_end, a_end),
        tl.where(swap, a_start, b_start),
        tl.where(swap, a_end, b_end),
    )


@triton.jit
def local_queries(lo, hi, q_start, q_len):
    """A range of logical positions as rows of q, the first row that exists being 0."""
    lo = to_int64(lo) - q_start
    hi = to_int64(hi) - q_start
    lo = tl.minimum(tl.maximum(lo, 0), q_len)
    hi = tl.minimum(tl.maximum(hi, -1), q_len - 1)
    return lo.to(tl.int32), hi.to(tl.int32)


@triton.jit
def lowest_bit(bits):
    """The number of the lowest bit that is set, by the exponent of that power of two."""
    power = (bits & -bits).to(tl.uint32, bitcast=True).to(tl.float32)
    return (power.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def next_word(word, bits, words, more):
    """Where no bit is left, the next entry of a compressed map: the number of a word of 32 tiles,
    and its bits. Gives word, bits and the place of the entry after it."""
    read = (bits == 0) & more
    next_number = tl.load(words, mask=read, other=0)
    next_bits = tl.load(words + 1, mask=read, other=0)
    return (
        tl.where(read, next_number, word),
        tl.where(read, next_bits, bits),
        words + tl.where(read, 2, 0),
    )


# -- tile structure ----------------------------------------------------------------------------


@triton.jit
def ends_of(value, exists):
    """The least and the greatest value at positions that exist, as int64; of bools: every, some."""
    value = value.to(tl.int64)
    lo = tl.min(tl.where(exists, value, 9223372036854775807), 0)
    return lo, tl.max(tl.where(exists, value, -9223372036854775808), 0)


@triton.jit
def as_words(flags, CHUNK: tl.constexpr):
    """Flags of CHUNK tiles as words of 32 bits."""
    bits = tl.reshape(flags.to(tl.int64), [CHUNK // 32, 32])
    return tl.sum(bits << tl.arange(0, 32)[None, :].to(tl.int64), 1).to(tl.int32)


@triton.jit
def block_places(start_m, start_n, blocks_m, blocks_n, stride_m, stride_n):
    """Where the user's blocks that hold the tiles are."""
    return (start_m // blocks_m) * stride_m + (start_n // blocks_n) * stride_n


@triton.jit
def write_run(tile_runs, PLACE: tl.constexpr, number, tile, before, length):
    """Run `number` of a kind begins at `tile`; only four fit, the others are counted."""
    fits = number < 4
    tl.store(tile_runs + PLACE + number, tile - before, mask=fits)
    tl.store(tile_runs + PLACE + 4 + number, before + length, mask=fits)


@triton.jit
def close_runs(tile_runs, PLACE: tl.constexpr, number, tiles, scattered):
    """The counts of runs that are not there; of all runs where the tiles are scattered."""
    slot = tl.arange(0, 4)
    tl.store(tile_runs + PLACE + 4 + slot, slot * 0 + tiles, mask=(slot >= number) | scattered)


# -- attention ---------------------------------------------------------------------------------


@triton.jit
def online_softmax(m_i, l_i, acc, s):
    """One tile of scores, in base 2: new (m_i, l_i, acc) before its values are added, and p."""
    m_new = tl.maximum(m_i, tl.max(s, 1))
    # A row may be fully masked so far: then m_new is -inf, and -inf - -inf would be nan.
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - m_safe[:, None])
    alpha = tl.exp2(m_i - m_safe)
    return m_new, l_i * alpha + tl.sum(p, 1), acc * alpha[:, None], p


@triton.jit
def online_softmax_scaled(m_i, l_i, acc, qk, scale):
    """The same for scores qk * scale, scale > 0: product and subtraction are one FMA."""
    m_new = tl.maximum(m_i, tl.max(qk, 1) * scale)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(tl.fma(qk, scale, -m_safe[:, None]))
    alpha = tl.exp2(m_i - m_safe)
    return m_new, l_i * alpha + tl.sum(p, 1), acc * alpha[:, None], p


@triton.jit
def chained(gradient, slope):
    """gradient * slope, and 0 where nothing arrives: there the slope may be nan or infinite."""
    return tl.where(gradient == 0.0, 0.0, gradient * slope)


@triton.jit
def along_diagonals(x, BLOCK: tl.constexpr):
    """Sums of a square tile by row - column: for 0, 1, ..., and for -BLOCK, 1 - BLOCK, ...

    Column u of the turned tile holds the columns (row - u) % BLOCK: it lies on the diagonal u
    where u <= row, on u - BLOCK where not.
    """
    row = tl.arange(0, BLOCK)[:, None]
    u = tl.arange(0, BLOCK)[None, :]
    turned = tl.gather(x, (row - u + BLOCK) % BLOCK, 1)
    below = tl.sum(tl.where(u <= row, turned, 0.0), 0)
    above = tl.sum(tl.where(u <= row, 0.0, turned), 0)
    return below, above


# -- what rounding o to 16 bits takes away -----------------------------------------------------

# delta = rowsum(o * do) would carry the rounding of o into every gradient of scores. A backward is
# given the residual beside o: 2 bits an element, a quarter of o's last place. As floats of one sign
# are in the order of their bits, it is a difference of bits, also where o is a power of two.


@triton.jit
def bits_of(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def residual_codes(x, o):
    """In which quarter of the last place of `o` what rounding took from x is: -2 to 1.

    Quarters begin a little lower, so that next to nothing on either side is in quarter 0.
    """
    QUARTER: tl.constexpr = 11 if o.dtype == tl.float16 else 14
    LITTLE: tl.constexpr = 1 << (QUARTER - 6)
    apart = tl.minimum(bits_of(x) - bits_of(o) + LITTLE, (2 << QUARTER) - 1)
    if o.dtype == tl.float16:
        # Where its exponents end, last places count more than here.
        apart = tl.maximum(apart, -(2 << QUARTER))
    return (apart >> QUARTER) & 3


@triton.jit
def restored(o, codes):
    """float32 within a seventh of the last place of what was rounded to `o`.

    A row of quarter 0 alone lost nothing: a query that sees one key, whose value is all of o.
    """
    QUARTER: tl.constexpr = 11 if o.dtype == tl.float16 else 14
    MIDDLE: tl.constexpr = (1 << (QUARTER - 1)) - (1 << (QUARTER - 6))
    lost = (tl.max(codes & 3, 1) != 0)[:, None]
    middle = tl.where(lost, (codes << QUARTER) + MIDDLE, 0)
    near = (bits_of(o) + middle).to(tl.float32, bitcast=True)
    # Numbers too large for float16 became infinite.
    return tl.where(tl.abs(o.to(tl.float32)) == float("inf"), o.to(tl.float32), near)


@triton.jit
def packed(codes, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Codes [ROWS, WIDTH] as words of int32 [ROWS, 4 for 64 columns], without moving a value.

    Four threads share a row of a product, and hold two columns of each 8: word L of 64 columns has
    the columns 2L and 2L + 1, those 8 further on in its next 4 bits, and so on.
    """
    GROUPS: tl.constexpr = 8 if WIDTH >= 64 else WIDTH // 8
    codes = codes << (columns % 64 // 8 * 4 + columns % 2 * 2)[None, :]
    codes = tl.reshape(codes, [ROWS, WIDTH // (8 * GROUPS), GROUPS, 4, 2])
    return tl.reshape(tl.sum(tl.sum(codes, 4), 2), [ROWS, WIDTH // (2 * GROUPS)])


@triton.jit
def load_codes(rows, exists, WORDS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Codes [ROWS, WIDTH] of rows of packed words; 0 in rows that do not exist.

    The first 4 bits of 4 words have the codes of 8 columns of o, and so on.
    """
    GROUPS: tl.constexpr = 8 if WIDTH >= 64 else WIDTH // 8
    chunk = tl.arange(0, WIDTH // (8 * GROUPS))[None, :, None, None]
    group = tl.arange(0, GROUPS)[None, None, :, None]
    word = 4 * chunk + tl.arange(0, 4)[None, None, None, :] + 0 * group
    inside = exists[:, None, None, None] & (word < WORDS)
    words = tl.load(rows[:, None, None, None] + word, mask=inside, other=0)
    even, odd = words << (30 - 4 * group), words << (28 - 4 * group)
    return tl.reshape(tl.join(even >> 30, odd >> 30), [ROWS, WIDTH])
