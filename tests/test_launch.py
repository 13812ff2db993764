"""Launching: how arguments are packed, what is loaded when, and what errors say."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

from scoremod import launch as launching
from scoremod.backends.compile_triton import Kernel, Scratch, TensorMap, compile_kernel
from scoremod.errors import BackendUnavailable, InputMismatch
from scoremod.launch import CudaDriver, HipLauncher, Launcher, bfloat16_bits, launcher, layout
from scoremod.plan_triton import Argument
from scoremod.target import Target, parse_target

KINDS = "i1 i8 u8 i16 u16 i32 u32 i64 u64 fp16 bf16 fp32 fp64 *bf16 *i32".split()
LETTERS = {**dict(zip(KINDS, "?bBhHiIqQeHfdQQ", strict=True)), "tensormap": "128s"}


def kernel(*kinds: str, **fields: object) -> Kernel:
    """A kernel with arguments a0, a1, ... of these types."""
    plain = Kernel(
        entry="attention_fwd",
        target=parse_target("cuda:90"),
        image=b"cubin",
        arguments=tuple(Argument(f"a{k}", kind) for k, kind in enumerate(kinds)),
        global_scratch=Scratch(),
        profile_scratch=Scratch(),
        constants=(("BLOCK_M", 64),),
        num_warps=4,
        cluster=(1, 1, 1),
        shared=2048,
        registers=64,
        spills=0,
        text="",
        triton="3.6.0",
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


@dataclass
class FakeDriver:
    """Writes down what it is asked for, and reads what it is given as the real one would."""

    kinds: tuple[str, ...] = ()
    index: int = 0
    codes: list[int] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    binds: list[int] = field(default_factory=list)
    calls: list[SimpleNamespace] = field(default_factory=list)
    maps: list[int] = field(default_factory=list)
    cleared: list[tuple[int, int]] = field(default_factory=list)

    def device(self) -> int:
        return self.index

    def bind(self, device: int) -> None:
        self.binds.append(device)

    def load(self, kernel: Kernel, device: int) -> int:
        self.loads.append(device)
        return 1000 + device

    def launch(self, config: int, function: int, arguments: int, extra: None) -> int:
        words = struct.unpack("=7I4xQQI4x", ctypes.string_at(config, 56))
        letters = [LETTERS[kind] for kind in self.kinds] + ["Q", "Q"]
        addresses = struct.unpack(
            f"={len(letters)}Q", ctypes.string_at(arguments, 8 * len(letters))
        )
        values = []
        for letter, address in zip(letters, addresses, strict=True):
            size = struct.calcsize(letter)
            assert address % min(size, 64) == 0
            values += struct.unpack(f"={letter}", ctypes.string_at(address, size))
        self.calls.append(
            SimpleNamespace(
                grid=words[0:3],
                block=words[3:6],
                shared=words[6],
                stream=words[7],
                attributes=ctypes.string_at(words[8], 72 * words[9]),
                function=function,
                values=tuple(values[:-2]),
                scratch=tuple(values[-2:]),
                addresses=addresses,
            )
        )
        return self.codes.pop(0) if self.codes else 0

    def tensor_map(self, x: torch.Tensor, tile: TensorMap) -> bytes:
        self.maps.append(x.data_ptr())
        return x.data_ptr().to_bytes(8, "little") + bytes(tile.box) + bytes(120 - len(tile.box))

    def clear(self, address: int, stream: int) -> None:
        self.cleared.append((address, stream))

    def error(self, code: int) -> str:
        return f"CUDA_ERROR_{code}"


def ready(*kinds: str, **fields: object) -> tuple[Launcher, FakeDriver]:
    driver = FakeDriver(kinds)
    return Launcher(kernel(*kinds, **fields), driver), driver


# -- packing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", KINDS)
def test_arguments_lie_at_multiples_of_their_size(first: str) -> None:
    for second in KINDS:
        found = layout((Argument("x", first), Argument("y", second), Argument("z", "i1")))
        sizes = [struct.calcsize(LETTERS[kind]) for kind in (first, second, "i1")] + [8, 8]
        assert all(at % size == 0 for at, size in zip(found.offsets, sizes, strict=True))
        ends = [at + size for at, size in zip(found.offsets, sizes, strict=True)]
        assert all(end <= at for end, at in zip(ends, found.offsets[1:], strict=False))
        assert found.packer.size == ends[-1]


def test_every_type_reaches_the_driver() -> None:
    x, y = torch.empty(3, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int32)
    given = [True, -128, 255, -32768, 65535, -(2**31), 2**32 - 1, -(2**63), 2**64 - 1]
    given += [0.5, 3.0, -1.5, 1e300, x, y]
    launch, driver = ready(*KINDS)
    launch.launch((5, 6, 7), 77, given)
    (call,) = driver.calls
    assert call.values == (*given[:10], 0x4040, -1.5, 1e300, x.data_ptr(), y.data_ptr())
    assert (call.grid, call.block, call.shared) == ((5, 6, 7), (128, 1, 1), 2048)
    assert (call.stream, call.function, call.scratch) == (77, 1000, (0, 0))
    assert call.attributes == b""


def test_bfloat16_rounds_to_even() -> None:
    values = {1.0: 0x3F80, -2.0: 0xC000, 1 + 2**-8: 0x3F80, 1 + 3 * 2**-8: 0x3F82}
    assert {v: bfloat16_bits(v) for v in values} == values
    assert bfloat16_bits(float("inf")) == 0x7F80


def test_floats_of_all_kinds_pass() -> None:
    launch, driver = ready("fp32", "fp32", "fp32")
    launch.launch((1, 1, 1), 0, (float("inf"), -0.0, 2))
    assert str(driver.calls[0].values) == "(inf, -0.0, 2.0)"


def test_a_buffer_is_written_again_and_not_made_again() -> None:
    launch, driver = ready("i32", "fp32", "*bf16")
    x, y = torch.empty(8), torch.empty(8)
    for values in ((1, 0.5, x), (1, 0.5, x), (2, 0.5, y), (2, -0.0, y), (3, 0.0, x)):
        launch.launch((1, 1, 1), 0, values)
        expected = (*values[:2], values[2].data_ptr())
        assert str(driver.calls[-1].values) == str(expected)
    assert len({call.addresses for call in driver.calls}) == 1
    assert driver.loads == [0]


def test_a_launch_is_prepared_once_and_runs_often() -> None:
    launch, driver = ready("i32")
    prepared = launch.prepare((7,))
    prepared.launch((1, 2, 1), 5)
    prepared.launch((9, 2, 1), 6)
    assert [(c.grid, c.stream, c.values) for c in driver.calls] == [
        ((1, 2, 1), 5, (7,)),
        ((9, 2, 1), 6, (7,)),
    ]


def test_an_empty_grid_is_no_launch() -> None:
    launch, driver = ready("i32")
    for grid in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        launch.launch(grid, 0, (1,))
    assert driver.calls == []


def test_a_cluster_is_a_launch_attribute() -> None:
    launch, driver = ready("i32", cluster=(2, 1, 1))
    launch.launch((5, 6, 1), 0, (1,))
    (call,) = driver.calls
    assert call.grid == (10, 6, 1)
    dimension, scheduling = call.attributes[:72], call.attributes[72:]
    assert struct.unpack("=I4x3I", dimension[:20]) == (4, 2, 1, 1)
    assert struct.unpack("=I4xI", scheduling[:12]) == (5, 1)


def test_scratch_is_allocated_by_program_and_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []

    def empty(size: int, **_: object) -> torch.Tensor:
        made.append(torch.zeros(size, dtype=torch.uint8))
        return made[-1]

    launch, driver = ready(
        "i32", global_scratch=Scratch(100, 128), profile_scratch=Scratch(3, 1), cluster=(2, 1, 1)
    )
    monkeypatch.setattr(launching, "current_stream", lambda _: 9)
    monkeypatch.setattr(torch, "empty", empty)
    launch.launch((3, 2, 1), 9, (1,))
    (call,) = driver.calls
    assert [m.numel() for m in made] == [100 * 12 + 128, 3 * 12 + 1]
    for address, memory, size in zip(call.scratch, made, (1200, 36), strict=True):
        assert memory.data_ptr() <= address <= memory.data_ptr() + memory.numel() - size
    assert call.scratch[0] % 128 == 0


def test_a_tensor_map_lies_at_64_bytes_and_is_encoded_once() -> None:
    tiles = (TensorMap("bf16", (1, 1, 64, 32), 3), TensorMap("bf16", (1, 1, 16, 8), 2))
    launch, driver = ready("i32", "tensormap", "i8", "tensormap", tensor_maps=tiles)
    x, y = (torch.empty(1, 1, 8, 64, dtype=torch.bfloat16) for _ in range(2))
    for values in ((1, x, 2, y), (1, x, 3, y), (1, y, 3, y)):
        launch.launch((1, 1, 1), 0, values)
        found = driver.calls[-1]
        assert all(found.addresses[k] % 64 == 0 for k in (1, 3))
        assert found.values[0] == values[0] and found.values[2] == values[2]
        for k, tile in ((1, tiles[0]), (3, tiles[1])):
            address = int.from_bytes(found.values[k][:8], "little")
            assert address == values[k].data_ptr()
            assert found.values[k][8:12] == bytes(tile.box)
    assert driver.maps == [x.data_ptr(), y.data_ptr(), y.data_ptr()]


def test_a_tensor_map_of_another_shape_is_another_one() -> None:
    launch, driver = ready("tensormap", tensor_maps=(TensorMap("bf16", (1, 1, 8, 8), 3),))
    x = torch.empty(2, 2, 8, 64)
    for view in (x, x[:1], x.transpose(0, 1), x):
        launch.launch((1, 1, 1), 0, (view,))
    assert len(driver.maps) == 3


def test_a_counter_is_cleared_on_the_stream_of_its_launch() -> None:
    launch, driver = ready("*i32")
    counter = torch.ones(1, dtype=torch.int32)
    launch.clear(counter, 77)
    assert driver.cleared == [(counter.data_ptr(), 77)]


def test_a_number_is_no_tensor_map() -> None:
    launch, _ = ready("tensormap", tensor_maps=(TensorMap("bf16", (1, 1, 8, 8), 3),))
    with pytest.raises(InputMismatch, match="`a0` of kernel `attention_fwd` is a pointer"):
        launch.launch((1, 1, 1), 0, (5,))


# -- threads and devices -----------------------------------------------------------------------


def test_each_gpu_loads_once_and_each_thread_has_its_buffer() -> None:
    launch, driver = ready("i32")
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for step in range(50):
            launch.launch((1, 1, 1), number, (1000 * number + step,))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.loads == [0] and len(driver.calls) == 400
    assert all(call.values[0] // 1000 == call.stream for call in driver.calls)
    driver.index = 3
    launch.launch((1, 1, 1), 0, (1,))
    assert driver.loads == [0, 3] and driver.calls[-1].function == 1003


def test_a_lost_context_is_bound_again() -> None:
    launch, driver = ready("i32")
    prepared = launch.prepare((1,))
    before = len(driver.binds)
    driver.codes = [201]
    prepared.launch((1, 1, 1), 0)
    assert len(driver.calls) == 2 and len(driver.binds) == before + 1


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("i32", 2**31, "`a0` of kernel `attention_fwd` is 2147483648, which i32 cannot hold"),
        ("i32", -(2**31) - 1, "which i32 cannot hold"),
        ("i32", 1.5, "is 1.5, which i32 cannot hold"),
        ("i64", 2**63, "which i64 cannot hold"),
        ("fp32", 1e300, "which fp32 cannot hold"),
        ("fp32", "x", "is 'x', which fp32 cannot hold"),
        ("bf16", None, "is None, which bf16 cannot hold"),
        ("i32", torch.zeros(1), "is a number, i32, but got a tensor"),
        ("*bf16", 5, "is a pointer, but got 5"),
    ],
)
def test_a_value_that_does_not_fit_is_named(kind: str, value: object, words: str) -> None:
    launch, driver = ready(kind)
    with pytest.raises(InputMismatch, match=words.replace("(", "\\(")):
        launch.launch((1, 1, 1), 0, (value,))  # type: ignore[arg-type]
    assert driver.calls == []


@pytest.mark.parametrize("values", [(), (1,), (1, 2, 3)])
def test_a_wrong_number_of_values_is_an_error(values: tuple[int, ...]) -> None:
    launch, _ = ready("i32", "i32")
    with pytest.raises(InputMismatch, match=f"takes 2 arguments, not {len(values)}"):
        launch.launch((1, 1, 1), 0, values)


def test_a_failed_launch_says_what_and_why() -> None:
    launch, driver = ready("i32")
    driver.codes = [1, 719]
    with pytest.raises(BackendUnavailable, match=r"over a grid of .*CUDA_ERROR_1\n.*65535"):
        launch.launch((1, 70000, 1), 0, (1,))
    with pytest.raises(BackendUnavailable, match=r"CUDA_ERROR_719\n.*CUDA_LAUNCH_BLOCKING"):
        launch.launch((1, 1, 1), 0, (1,))


def test_a_missing_driver_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(launching, "cuda_driver", CudaDriver)  # which may be open already
    with pytest.raises(BackendUnavailable, match=r"driver is missing: libcuda\.so\.1"):
        Launcher(kernel("i32")).prepare((1,))


def test_missing_bindings_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BackendUnavailable, match="pip install cuda-bindings"):
        CudaDriver()


def test_an_image_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Code(int):
        name = "CUDA_ERROR_NO_BINARY_FOR_GPU"

    fake = CudaDriver.__new__(CudaDriver)
    fake._driver = SimpleNamespace(
        cuCtxGetCurrent=lambda: (0, 5),
        cuModuleLoadData=lambda image: (209, None),
        cuGetErrorString=lambda code: (0, b"no kernel image is available"),
        CUresult=Code,
    )
    monkeypatch.setattr(launching, "device", lambda index: parse_target("cuda:80"))
    message = "compiled for cuda:90, does not load on GPU 2 .cuda:80.: CUDA_ERROR_NO_BINARY"
    with pytest.raises(BackendUnavailable, match=message):
        fake.load(kernel("i32"), 2)


def test_shared_memory_and_clusters_are_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    fake = CudaDriver.__new__(CudaDriver)
    fake._driver = SimpleNamespace(
        cuCtxGetCurrent=lambda: (0, 0),
        CUdevice=int,
        cuDevicePrimaryCtxRetain=lambda device: (0, 40 + device),
        cuCtxSetCurrent=lambda context: asked.update(context=context) or (0,),
        cuModuleLoadData=lambda image: (0, image),
        cuModuleGetFunction=lambda module, name: (0, 123 if name == b"attention_fwd" else 0),
        cuFuncSetAttribute=lambda function, name, value: asked.update({name: value}) or (0,),
        CUfunction_attribute=SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared",
            CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED="large",
        ),
    )
    monkeypatch.setattr(launching, "device", lambda index: parse_target("cuda:90"))
    assert fake.load(kernel("i32", cluster=(16, 1, 1)), 2) == 123
    assert asked == {"context": 42, "shared": 2048, "large": 1}


# -- devices -----------------------------------------------------------------------------------


def test_a_device_is_a_target_with_its_own_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(major=12, minor=1, shared_memory_per_block_optin=101376)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    launching._device.cache_clear()
    assert launching.device(0) == Target("cuda", "121", 101376)
    launching._device.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    found.gcnArchName = "gfx942:sramecc+:xnack-"
    assert launching.device(0) == parse_target("hip:gfx942")
    launching._device.cache_clear()


def test_no_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="torch sees no GPU"):
        launching.device()


def test_the_target_decides_the_launcher() -> None:
    assert isinstance(launcher(kernel()), Launcher)
    assert isinstance(launcher(kernel(target=parse_target("hip:gfx942"))), HipLauncher)


# -- on a GPU ----------------------------------------------------------------------------------

SCALE = '''
import triton
import triton.language as tl


@triton.jit
def scale(x, y, n, offset, factor, shift, BLOCK: tl.constexpr):
    """y = x * factor + shift + offset."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n) * factor + shift.to(tl.float32) + offset.to(tl.float32)
    tl.store(y + i, value, mask=i < n)
'''


def scale(target: Target) -> Kernel:
    kinds = {
        "x": "*fp32",
        "y": "*fp32",
        "n": "i32",
        "offset": "i64",
        "factor": "fp32",
        "shift": "bf16",
    }
    return compile_kernel(
        SCALE,
        "scale",
        tuple(Argument(name, kind) for name, kind in kinds.items()),
        {"BLOCK": 256},
        target,
        num_warps=4,
        num_stages=1,
        aligned=False,
        even=False,
        fp_fusion=True,
    )


def run_scale(run: Launcher | HipLauncher) -> None:
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    y = torch.full_like(x, float("nan"))
    stream = launching.current_stream(torch.cuda.current_device())
    run.launch((4, 1, 1), stream, (x, y, 1000, -3, 0.5, 1.25))
    torch.testing.assert_close(y, x * 0.5 + 1.25 - 3)


@pytest.mark.gpu
def test_a_kernel_runs_on_the_gpu() -> None:
    run = launcher(scale(launching.device()))
    run_scale(run)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            run_scale(run)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run_scale(run)


@pytest.mark.gpu
def test_a_kernel_for_another_gpu_does_not_load() -> None:
    here = launching.device()
    other = parse_target("cuda:80" if here.arch != "80" else "cuda:90")
    with pytest.raises(BackendUnavailable, match=f"compiled for {other}, does not load on GPU"):
        run_scale(Launcher(scale(other)))


@pytest.mark.gpu
def test_launch_time(capsys: pytest.CaptureFixture[str]) -> None:
    run = launcher(scale(launching.device()))
    x = torch.zeros(1000, device="cuda")
    stream = launching.current_stream(torch.cuda.current_device())
    times = []
    for k in range(2000):
        start = time.perf_counter()
        run.launch((4, 1, 1), stream, (x, x, 1000, 0, 0.5, 1.25))
        times.append(time.perf_counter() - start)
        if k % 50 == 0:
            torch.cuda.synchronize()
    with capsys.disabled():
        print(f"\nlaunch of 6 arguments: {sorted(times)[1000] * 1e6:.1f} us")
