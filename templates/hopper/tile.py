"""Shared steps of the Hopper kernels; a rendered kernel gets copies of those that it calls.

What is elementwise, and how many tiles a mask leaves, comes from the portable backend's steps.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Each kernel has these lines itself: Triton has given all three new names.
copy_in = getattr(tma, "async_load", tma.async_copy_global_to_shared)
copy_out = getattr(tma, "async_store", tma.async_copy_shared_to_global)
shared_memory = gl.shared_memory_descriptor
reinterpret = getattr(shared_memory, "reinterpret", None) or shared_memory._reinterpret

# -- shared memory -----------------------------------------------------------------------------


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """mbarriers that complete a phase after so many arrivals each.

    One array for each purpose: Gluon orders accesses to one array by a barrier of all warps.
    """
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(NUMBER):
        mbarrier.init(made.index(k), count=ARRIVALS)
    return made


@gluon.jit
def numbers(NUMBER: gl.constexpr):
    """Room for numbers that one warp leaves for others."""
    return gl.allocate_shared_memory(gl.int32, [NUMBER, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def fetch(tensor, b, h, row, full, tile):
    """Start the copy of a tile [1, 1, rows, head dim]; rows past the end come as zeros."""
    mbarrier.expect(full, tensor.block_type.nbytes)
    copy_in(tensor, [b, h, row, 0], full, tile)


@gluon.jit
def leave(tensor, b, h, row, tile):
    """Start the copy of a fenced tile to a tensor; rows past its end are left out."""
    copy_out(tensor, [b, h, row, 0], tile)


@gluon.jit
def wait_until_left():
    """Wait until tiles have left shared memory."""
    tma.store_wait(0)


@gluon.jit
def wait_until_written():
    """Wait until tiles have left and lie in memory, where later ones may replace them."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, $1;", "=r,r", [0], gl.int32, is_pure=False, pack=1
    )
    tma.store_wait(0)


@gluon.jit
def clear_rows(
    tiles, slot, first, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr
):
    """Put zeros into the rows of a tile from `first` on.

    A swizzled tile is panels of 64 columns, a row of which is 128 bytes in whatever order: 8 rows
    are looked at together, as 256 numbers.
    """
    PANELS: gl.constexpr = WIDTH // 64
    GROUPS: gl.constexpr = BLOCK_N // 8
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    memory = reinterpret(tiles, gl.int32, [STAGES * PANELS * GROUPS, 256], plain)
    row_of_group = gl.arange(0, 256, layout=layout) // 32
    for group in range(first // 8, GROUPS):
        for panel in gl.static_range(PANELS):
            rows = memory.index((slot * PANELS + panel) * GROUPS + group)
            rows.store(gl.where(group * 8 + row_of_group < first, rows.load(layout), 0))


# -- turns -------------------------------------------------------------------------------------


@gluon.jit
def in_order_of_heads(turn, q_tiles):
    """The (head, q tile) of a turn: all q tiles of a head, whose k and v then stay in L2."""
    return turn // q_tiles, turn % q_tiles


@gluon.jit
def next_turn(counter, turns):
    """Draw a turn that no program has had."""
    turn = turns
    if gl.num_programs(0) < turns:
        turn = gl.num_programs(0) + gl.atomic_add(counter, 1)
    return uniform(turn)


@gluon.jit
def write_number(place, value):
    """Leave a number [1] for the other warps."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place.store(gl.full([1], value, gl.int32, one))


@gluon.jit
def read_number(place):
    """A number [1] that another warp left."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return uniform(gl.max(place.load(one), 0))


@gluon.jit
def uniform(x):
    """A number that is the same in all lanes, and that ptxas knows to be.

    It keeps what is computed of it, places of tiles above all, in registers of the warp.
    """
    return gl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, 0xffffffff;",
        "=r,r",
        [x],
        gl.int32,
        is_pure=True,
        pack=1,
    )


# Named barriers of the threads of two consumers. From 8 on they are free: Triton numbers its own
# from 0.


@gluon.jit
def wait_at(barrier):
    """Wait until the other consumer has come to a barrier."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, $1;", "=r,r", [barrier], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def come_to(barrier):
    """Let the other consumer pass a barrier, without waiting."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.u32 $0, $1;", "=r,r", [barrier], gl.int32, is_pure=False, pack=1
    )


# Consumers take turns to issue their products, so that one's softmax runs under the other's
# products.


@gluon.jit
def wait_for_products(WHO: gl.constexpr):
    wait_at(8 + WHO)


@gluon.jit
def pass_products_on(WHO: gl.constexpr, CONSUMERS: gl.constexpr):
    come_to(8 + (WHO + 1) % CONSUMERS)


# -- kv tiles ----------------------------------------------------------------------------------


@gluon.jit
def narrow(tile):
    return gl.cast(tile, gl.int32)


@gluon.jit
def kv_tile(t, partial_count, first, full_first, full_end):
    """The number of the t-th tile to visit: the partial ones, then the full ones."""
    partial = last_partial_tile(t, partial_count, first, full_first, full_end)
    return gl.where(t < partial_count, partial, full_first + (t - partial_count))


@gluon.jit
def last_partial_tile(t, partial_count, first, full_first, full_end):
    """The t-th visible tile that is not full: those after the full ones, then those before.

    Of a causal mask or a window all queries see some keys of the first.
    """
    after = partial_count - (full_first - first)
    return gl.where(t < after, full_end + t, first + (t - after))


@gluon.jit
def partial_tile(t, first, full_first, full_end):
    """The t-th visible tile that is not full: those before the full ones, then those after."""
    before = full_first - first
    return gl.where(t < before, first + t, full_end + (t - before))


@gluon.jit
def stored_tile(t, partial_count, runs):
    """The same of a row in a stored structure."""
    partial = run_of(t, runs)
    return gl.where(t < partial_count, partial, run_of(t - partial_count, runs + 8))


@gluon.jit
def run_of(t, runs):
    """The t-th tile of one kind: four shifts, and how many tiles the runs up to each have."""
    shift = gl.load(runs + 3)
    for k in gl.static_range(3):
        shift = gl.where(t < gl.load(runs + 6 - k), gl.load(runs + 2 - k), shift)
    return t + shift


@gluon.jit
def structure_row(b, h, start_n, kv_len, stride_b, stride_h, BLOCK_N: gl.constexpr):
    """Which row of a structure a kv tile has, for one query head."""
    rows = gl.cdiv(kv_len, BLOCK_N)
    return ((b * stride_b + h * stride_h) * rows + start_n // BLOCK_N).to(gl.int64)


@gluon.jit
def full_runs(runs):
    """How many runs of full tiles a row has."""
    found = 0
    for k in gl.static_range(4):
        found += (gl.load(runs + 4 + k) > (gl.load(runs + 3 + k) if k > 0 else 0)).to(gl.int32)
    return found


@gluon.jit
def stretch_tiles(stretch, stretches, count, runs):
    """How many partial and how many full tiles a stretch of a row has.

    A stretch is the partial tiles up to a run of full ones, and that run; the last has no run. All
    `count` tiles count as partial where no run is full, and where a map has them.
    From the record alone: numbers that a loop over stretches carried became 0 in Triton 3.6.
    """
    is_last = stretch == stretches - 1
    before = gl.where(stretch > 0, gl.load(runs + 11 + stretch), 0)  # full tiles
    first = gl.where(stretch > 0, before + gl.load(runs + 7 + stretch), 0)
    end = gl.where(is_last, 2147483647, before + gl.load(runs + 8 + stretch))
    partial, start = 0, 0
    for k in gl.static_range(4):
        shift, stop = gl.load(runs + k), gl.load(runs + 4 + k)
        inside = gl.minimum(stop + shift, end) - gl.maximum(start + shift, first)
        # The shift of a run that is not there may be anything.
        partial += gl.minimum(gl.maximum(inside, 0), stop - start)
        start = stop
    partial = gl.where(stretches > 1, partial, count)
    return partial, gl.where(is_last, 0, gl.load(runs + 12 + stretch) - before)


@gluon.jit
def kept(s, keep):
    """Scores with -inf where `keep` is False.

    LLVM would make a selection for each of the conditions that `keep` is made of; what assembly
    looks at is one, and the assembler joins comparisons.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r",
        [s, keep.to(gl.int32)],
        gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def kept_powers(p, keep):
    """p with 0 where `keep` is False, as `kept`: whatever became of scores there."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; selp.f32 $0, $1, 0f00000000, p; }",
        "=f,f,r",
        [p, keep.to(gl.int32)],
        gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def of_rows(key, rows):
    """The first or last key of each row, also where it is one for all rows."""
    return gl.zeros_like(rows) + narrow(key)


# -- softmax -----------------------------------------------------------------------------------


@gluon.jit
def row_max(s, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """The largest score of each row: pairs first, lanes last, which shortens the chain."""
    lanes = gl.max(gl.max(s.reshape([ROWS, BLOCK_N // 8, 4, 2]), 3), 1)
    return gl.max(lanes, 1)


@gluon.jit
def lane_sums(p, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Sums [ROWS, 4] of what each of a row's four lanes holds; they meet after the last tile."""
    return gl.sum(gl.sum(p.reshape([ROWS, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def store_lanes(places, sums, exists):
    """Store what `lane_sums` made, where a row exists."""
    gl.store(places, gl.convert_layout(gl.sum(sums, 1), places.type.layout), mask=exists)


@gluon.jit
def renewed_max(m_i, s, factor, rise, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """(maximum that counts this tile, what earlier sums shrink by) of scores s * factor + rise."""
    highest = gl.convert_layout(row_max(s, ROWS, BLOCK_N), m_i.type.layout) * factor + rise
    m_new = gl.maximum(m_i, highest)
    return m_new, gl.exp2(m_i - shift(m_new, 0))


@gluon.jit
def shift(m_i, HEADROOM: gl.constexpr):
    """What is taken off scores in base 2."""
    # A row may be fully masked so far: then m_i is -inf, and -inf - -inf would be nan.
    return gl.where(m_i == float("-inf"), 0.0, m_i) + HEADROOM


@gluon.jit
def powers(s, factor, taken):
    """p of scores that are `s * factor - taken` in base 2, the last one number a row."""
    return gl.exp2(s * factor - taken[:, None])


# Finding the largest score of a row takes as long as exp2, and every maximum does that is not far
# off: softmax is the same with any. So that of a row's first tile is kept, and a turn in which it
# was too small for later scores, or too large where the first tile was masked, is tried again with
# one that is renewed with each tile.


@gluon.jit
def out_of_range(doubtful, row_sum, acc, ROWS: gl.constexpr):
    """Whether a doubtful row of each warp's has sums that overflowed or vanished, as 0 or 1."""
    total = gl.convert_layout(gl.sum(acc, 1), row_sum.type.layout)
    right = (row_sum > 1e-20) & (row_sum < 1e30) & (total - total == 0.0)
    return gl.max((doubtful & ~right).to(gl.int32).reshape([4, ROWS // 4]), 1)


@gluon.jit
def to_repeat(number, turn_smem, verdicts, CONSUMERS: gl.constexpr):
    """Which turn it was that was said as the `number`-th, if a consumer wants it again, or -1."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    failed = 0
    for who in gl.static_range(CONSUMERS):
        verdict = verdicts.index(number % 2 * CONSUMERS + who)
        failed |= gl.max(verdict.load(layout), 0)
        verdict.store(gl.zeros([4], gl.int32, layout))
    return gl.where(uniform(failed) != 0, read_number(turn_smem.index(number % 2 * 16 + 11)), -1)


# p as 32-bit numbers of two neighbours: values of 16 bits that a loop carries are put together
# once more for each product, 32 instructions a tile.


@gluon.jit
def in_pairs(p, dtype: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """p [ROWS, BLOCK_N] in 16 bits, as [ROWS, BLOCK_N / 2] of 32."""
    KIND: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    left, right = gl.split(p.reshape([ROWS, BLOCK_N // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn." + KIND + ".f32 $0, $2, $1;",
        "=r,f,f",
        [left, right],
        gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def unpacked(words, dtype: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """What `in_pairs` made, as [ROWS, BLOCK_N] of 16 bits."""
    left, right = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [words],
        (gl.int16, gl.int16),
        is_pure=True,
        pack=1,
    )
    return gl.join(left, right).reshape([ROWS, BLOCK_N]).to(dtype, bitcast=True)


# -- the backward ------------------------------------------------------------------------------


@gluon.jit
def halves(x, layout: gl.constexpr):
    """A product [rows, columns] as its left and right columns."""
    left, right = gl.split(gl.permute(x.reshape([x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def together(left, right):
    """What `halves` made, as one again."""
    x = gl.permute(gl.join(left, right), (0, 2, 1))
    return x.reshape([x.shape[0], 2 * x.shape[2]])


@gluon.jit
def full_tile(t, turn, full_first, full_end):
    """The t-th full tile, the first one being `turn` tiles in.

    Programs of one head start apart, or all would add to one tile of dq at a time.
    """
    place, count = t + turn, full_end - full_first
    return full_first + gl.where(place < count, place, place - count)


@gluon.jit
def bring(tensor, place, full, tile):
    """Start the copy of a tile whose bytes `full` expects already."""
    copy_in(tensor, place, full, tile)


@gluon.jit
def wait_until_read(PENDING: gl.constexpr):
    """Wait until all but the last tiles that are leaving have been read from shared memory."""
    tma.store_wait(PENDING)


@gluon.jit
def meet():
    """Wait for the other consumer."""
    wait_at(8)


# Consumers leave ds for each other, each in turns at two named barriers: one may be most of a step
# ahead.


@gluon.jit
def pass_ds_on(WHO: gl.constexpr, step):
    """Say that this consumer's ds of a step is there, and that dq of the step before is done."""
    come_to(9 + WHO + step % 2 * 2)


@gluon.jit
def wait_for_ds(WHO: gl.constexpr, step):
    """Wait for the other consumer's."""
    wait_at(10 - WHO + step % 2 * 2)


@gluon.jit
def in_thread_order(x):
    """A product [64, columns] as rows of 256 in which each thread's values are four neighbours.

    No value moves: stores are of 16 bytes and free of bank conflicts, and a tile is one stretch of
    memory. `attention_bwd_finish` undoes it.
    """
    CHUNKS: gl.constexpr = x.shape[1] // 8
    # warp, half, row, chunk, pair, column -> chunk, warp, row, pair, half, column
    x = gl.permute(x.reshape([4, 2, 8, CHUNKS, 4, 2]), (3, 0, 2, 4, 1, 5))
    return x.reshape([2 * CHUNKS, 256])


@gluon.jit
def from_thread_order(x):
    """What `in_thread_order` made, as a product again."""
    CHUNKS: gl.constexpr = x.shape[0] // 2
    # chunk, warp, row, pair, half, column -> warp, half, row, chunk, pair, column
    x = gl.permute(x.reshape([CHUNKS, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    return x.reshape([64, 8 * CHUNKS])


# Where heads take the sums of others, two are at work at a time. The last ones are together, or
# their longest tiles would run on alone.


@gluon.jit
def heads_in_pairs(program, tiles, heads):
    """The (head, tile) of a program: heads two by two, then the last three or four together."""
    last = first_of_last_heads(heads)
    in_pairs = program < last * tiles
    size, first = gl.where(in_pairs, 2, heads - last), gl.where(in_pairs, 0, last)
    place = program - first * tiles
    group = place // (size * tiles)
    rest = place - group * (size * tiles)
    return first + group * size + rest % size, rest // size


@gluon.jit
def end_of_next_heads(head, heads):
    """Where the heads end whose sums programs of a head clear: every second one from two on."""
    last = first_of_last_heads(heads)
    end = gl.where(head + 2 < last, head + 3, heads)
    return gl.where(head < last, end, head)


@gluon.jit
def first_of_last_heads(heads):
    """The first of the last three or four, after an even number of others; 0 of fewer heads."""
    return gl.maximum(heads - 3, 0) // 2 * 2


@gluon.jit
def places_of_records():
    """Of the 512 values, two records of `in_thread_order`, that are 8 columns of a product [64, .]:
    their places there, their rows and their columns, a warp having neighbours.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, gl.num_warps()], [1, 0])
    record = gl.arange(0, 2, layout=gl.SliceLayout(1, layout))[:, None]
    value = gl.arange(0, 256, layout=gl.SliceLayout(0, layout))[None, :]
    row = record * 32 + value // 128 * 16 + value // 2 % 2 * 8 + value // 16 % 8
    return record * 256 + value, row, record * 0 + value // 4 % 4 * 2 + value % 2


@gluon.jit
def hand_over(dq, step, dq_smem, full, empty):
    """Leave a part of dq to the warp that adds it up."""
    mbarrier.wait(empty, (step & 1) ^ 1)
    dq_smem.store(in_thread_order(dq))
    fence_async_shared()
    mbarrier.arrive(full, count=1)


@gluon.jit
def wait_for_turn(place, turn):
    """Wait until the number at `place`, which other programs raise, is `turn`."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred early; .reg .b32 found;
        again: ld.acquire.gpu.global.b32 found, [$1];
        setp.ne.b32 early, found, $2;
        @early bra again;
        fence.proxy.async.global;
        mov.b32 $0, found;
        }""",
        "=r,l,r",
        [gl.cast(place, gl.int64), turn],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def pass_turn_on(place, turn):
    """Say that it is another one's turn once all that this warp adds to memory is there."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred one; .reg .b32 lane;
        cp.async.bulk.wait_group 0;
        bar.warp.sync 0xffffffff;
        mov.b32 lane, %laneid;
        setp.eq.b32 one, lane, 0;
        @one st.release.gpu.global.b32 [$1], $2;
        mov.b32 $0, lane;
        }""",
        "=r,l,r",
        [gl.cast(place, gl.int64), turn],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def count_as_done(place):
    """Count each of these warps at `place`, and let who waits for that see what it wrote."""
    # A look at %tid.x costs consumers registers (50 accesses to spilled ones a tile).
    gl.inline_asm_elementwise(
        """{
        .reg .pred one; .reg .b32 lane;
        bar.warp.sync 0xffffffff;
        mov.b32 lane, %laneid;
        setp.eq.b32 one, lane, 0;
        @one red.release.gpu.global.add.u32 [$1], 1;
        mov.b32 $0, lane;
        }""",
        "=r,l",
        [gl.cast(place, gl.int64)],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@builtin
def add_to(tensor, coordinates, tile, _semantic=None):
    """Start adding a fenced tile to a tensor, in float32; Gluon 3.6 has no name for it."""
    places = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor.handle, places, tile.handle)
