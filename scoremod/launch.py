"""Launch compiled kernels with the CUDA driver alone: no Triton, no C compiler.

    launcher = Launcher(kernel)
    launcher.prepare((q, k, v, out, lse, *strides, q_len, ...)).launch((tiles, heads, 1), stream)

Arguments lie in one buffer per thread, written by one `struct` call; the driver copies them when
it launches, so the buffer is free again as soon as `launch` returns.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .backends.compile_triton import Kernel, Scratch, TensorMap, hip_launcher
from .errors import BackendUnavailable, InputMismatch
from .plan_triton import Argument
from .target import Target, parse_target

Value = int | float | torch.Tensor
Grid = tuple[int, int, int]
# Parts of torch.cuda have no types.
_cuda: Any = torch.cuda

# -- devices -----------------------------------------------------------------------------------


def device(index: int | None = None) -> Target:
    """The target that a GPU is, the current one by default."""
    return _device(_current_device() if index is None else index)


def _current_device() -> int:
    if not _cuda.is_initialized() and not _cuda.is_available():
        raise BackendUnavailable("torch sees no GPU", hint="torch.cuda.is_available() is False")
    return torch.cuda.current_device()


@functools.cache
def _device(index: int) -> Target:
    found = _cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return parse_target(f"hip:{found.gcnArchName.split(':')[0]}")
    # What a program may ask for, which is less than what a multiprocessor has.
    return Target("cuda", f"{found.major}{found.minor}", found.shared_memory_per_block_optin)


def current_stream(index: int) -> int:
    """The handle of a GPU's current stream; torch.cuda.current_stream makes an object first."""
    return int(torch._C._cuda_getCurrentRawStream(index))


# -- the driver --------------------------------------------------------------------------------


class Driver(Protocol):
    """What launching needs of a GPU's driver; tests bring their own."""

    def device(self) -> int:
        """The calling thread's current GPU."""

    def bind(self, device: int) -> None:
        """Make the GPU's context current in the calling thread."""

    def load(self, kernel: Kernel, device: int) -> int:
        """The handle of the kernel's function, with its shared memory granted."""

    def launch(self, config: int, function: int, arguments: int, extra: None) -> int:
        """cuLaunchKernelEx by addresses; gives its error code, 0 for none."""

    def tensor_map(self, x: torch.Tensor, tile: TensorMap) -> bytes:
        """How TMA copies tiles of a tensor: 128 bytes for a kernel's argument."""

    def clear(self, address: int, stream: int) -> None:
        """Set a 32-bit number in memory to 0, in the order of a stream."""

    def error(self, code: int) -> str:
        """Name and meaning of an error code."""


class CudaDriver:
    """NVIDIA's driver: cuda-bindings to load, ctypes to launch (half its time)."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise BackendUnavailable(
                f"NVIDIA's driver is missing: {error}", hint="install it, or use backend='cpu'"
            ) from None
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise BackendUnavailable(
                f"cuda-bindings cannot be imported: {error}", hint="pip install cuda-bindings"
            ) from None
        self._driver: Any = driver
        self.launch: Callable[[int, int, int, None], int] = library.cuLaunchKernelEx
        library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
        pointer, word = ctypes.c_void_p, ctypes.c_uint32
        self._set = library.cuMemsetD32Async
        self._set.argtypes = [ctypes.c_uint64, word, ctypes.c_size_t, pointer]
        self._encode = library.cuTensorMapEncodeTiled
        self._encode.argtypes = [pointer, word, word, *[pointer] * 5, *[word] * 4]

    def device(self) -> int:
        return torch.cuda.current_device()

    def bind(self, device: int) -> None:
        driver = self._driver
        # A thread that has not called the CUDA runtime so far has no context.
        if int(self._ok(driver.cuCtxGetCurrent())) == 0:
            context = self._ok(driver.cuDevicePrimaryCtxRetain(driver.CUdevice(device)))
            self._ok(driver.cuCtxSetCurrent(context))

    def load(self, kernel: Kernel, device: int) -> int:
        driver = self._driver
        self.bind(device)
        module = self._ok(driver.cuModuleLoadData(kernel.image), _misfit(kernel, device))
        function = self._ok(driver.cuModuleGetFunction(module, kernel.entry.encode()))
        attribute = driver.CUfunction_attribute
        wanted = {attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: kernel.shared}
        if kernel.cluster[0] > _PORTABLE_CLUSTER:
            wanted[attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
        for name, value in wanted.items():
            done = driver.cuFuncSetAttribute(function, name, value)
            self._ok(done, f"{_misfit(kernel, device)}; it wants {kernel.shared} bytes shared")
        return int(function)

    def tensor_map(self, x: torch.Tensor, tile: TensorMap) -> bytes:
        made = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        place = -ctypes.addressof(made) % _MAP_ALIGNMENT
        shape, strides = x.shape[::-1], x.stride()[::-1]
        # The stride of a dimension of size 1 is never used, but checked.
        pitches = [
            s * x.element_size() if n > 1 else _MAP_PITCH
            for n, s in zip(shape[1:], strides[1:], strict=True)
        ]
        rank = len(shape)
        code = self._encode(
            ctypes.addressof(made) + place,
            _MAP_ELEMENT[tile.element],
            rank,
            x.data_ptr(),
            (ctypes.c_uint64 * rank)(*shape),
            (ctypes.c_uint64 * (rank - 1))(*pitches),
            (ctypes.c_uint32 * rank)(*reversed(tile.box)),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            *(_NO_INTERLEAVE, tile.swizzle, _L2_128_BYTES, _ZEROS_OUTSIDE),
        )
        if code:
            raise BackendUnavailable(
                f"TMA cannot copy a tensor of shape {tuple(x.shape)} and strides {x.stride()}: "
                f"{self.error(code)}"
            )
        return made.raw[place : place + _MAP_BYTES]

    def clear(self, address: int, stream: int) -> None:
        code = self._set(address, 0, 1, stream)
        if code:
            raise BackendUnavailable(f"clearing a counter failed: {self.error(code)}")

    def error(self, code: int) -> str:
        try:
            result = self._driver.CUresult(code)
        except ValueError:
            return f"CUDA error {code}, newer than cuda-bindings"
        _, meaning = self._driver.cuGetErrorString(result)
        return f"{result.name} ({meaning.decode() if meaning else 'unknown'})"

    def _ok(self, result: tuple[Any, ...], what: str = "the CUDA driver failed") -> Any:
        code = int(result[0])
        if code:
            raise BackendUnavailable(f"{what}: {self.error(code)}")
        return result[1] if len(result) > 1 else None


_PORTABLE_CLUSTER = 8
# cuTensorMapEncodeTiled: a map's size and place, CUtensorMapDataType, and what else is chosen.
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_MAP_ELEMENT = {"f16": 6, "bf16": 9, "f32": 7}
_MAP_PITCH = 16  # strides are multiples of so many bytes
_NO_INTERLEAVE, _L2_128_BYTES, _ZEROS_OUTSIDE = 0, 2, 0


def _misfit(kernel: Kernel, index: int) -> str:
    return (
        f"the kernel `{kernel.entry}`, compiled for {kernel.target}, does not load "
        f"on GPU {index} ({device(index)})"
    )


@functools.cache
def cuda_driver() -> CudaDriver:
    """NVIDIA's driver, opened once."""
    return CudaDriver()


# -- arguments ---------------------------------------------------------------------------------

# struct's letters; all but tensor maps are stored at multiples of their size.
_LETTER = {
    "i1": "?",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u1": "?",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "fp16": "e",
    "bf16": "H",
    "fp32": "f",
    "fp64": "d",
    "tensormap": f"{_MAP_BYTES}s",
}
_POINTER = "Q"
_TENSOR_MAP = "tensormap"


@dataclass(frozen=True)
class Layout:
    """Where the arguments lie in the buffer, the two pointers to scratch memory last."""

    packer: struct.Struct
    offsets: tuple[int, ...]
    pointers: tuple[int, ...]  # which arguments are tensors
    halves: tuple[int, ...]  # which are bfloat16, which struct does not know
    maps: tuple[int, ...]  # which are tensors that TMA copies


def layout(arguments: Sequence[Argument]) -> Layout:
    """Place arguments one after the other, each aligned to its size.

    >>> layout((Argument("n", "i32"), Argument("x", "*fp32"))).offsets
    (0, 8, 16, 24)
    """
    kinds = [a.type for a in arguments] + ["*i8", "*i8"]
    text, end, offsets = "=", 0, []
    for kind in kinds:
        letter = _POINTER if kind.startswith("*") else _LETTER[kind]
        size = struct.calcsize(f"={letter}")
        gap = -end % (_MAP_ALIGNMENT if kind == _TENSOR_MAP else size)
        offsets.append(end + gap)
        text += "x" * gap + letter
        end += gap + size
    given = kinds[:-2]
    return Layout(
        struct.Struct(text),
        tuple(offsets),
        tuple(k for k, kind in enumerate(given) if kind.startswith("*")),
        tuple(k for k, kind in enumerate(given) if kind == "bf16"),
        tuple(k for k, kind in enumerate(given) if kind == _TENSOR_MAP),
    )


def bfloat16_bits(value: float) -> int:
    """A float rounded to bfloat16, to even where it lies half way.

    >>> hex(bfloat16_bits(1.0)), hex(bfloat16_bits(3.14159))
    ('0x3f80', '0x4049')
    """
    return int(torch.tensor(value, dtype=torch.bfloat16).view(torch.int16)) & 0xFFFF


# -- launching ---------------------------------------------------------------------------------

# CUlaunchConfig: grid, block, shared bytes, stream, attributes, their number.
_CONFIG = struct.Struct("=7I4xQQI4x")
_GRID = struct.Struct("=3I")
_STREAM = struct.Struct("=Q")
_STREAM_OFFSET = 32
# CUlaunchAttribute: which one, then a union of 64 bytes.
_ATTRIBUTE = struct.Struct("=I4x3I52x")
_CLUSTER_DIMENSION, _CLUSTER_SCHEDULING, _SPREAD = 4, 5, 1
# Of grids, in programs: CUDA's limits.
_GRID_LIMITS = (2**31 - 1, 65535, 65535)


class Launch:
    """A kernel's launch from one thread to one GPU: buffers that the driver reads.

    It holds until the thread's next `prepare` for this kernel and GPU.
    """

    def __init__(self, launcher: Launcher, function: int, device: int) -> None:
        self._launcher = launcher
        self._function = function
        self._device = device
        self._layout = launcher.layout
        self._store()

    def _store(self) -> None:
        """Lay out configuration, attributes, arguments and the pointers to them."""
        kernel, place = self._launcher.kernel, self._layout
        size = place.packer.size
        self._memory = ctypes.create_string_buffer(size + _MAP_ALIGNMENT)
        # Tensor maps lie at multiples of 64 bytes.
        start = ctypes.addressof(self._memory)
        start += -start % _MAP_ALIGNMENT
        self._arguments = (ctypes.c_char * size).from_address(start)
        pointers = [start + offset for offset in place.offsets]
        self._pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        attributes = b""
        if kernel.cluster != (1, 1, 1):
            attributes = _ATTRIBUTE.pack(_CLUSTER_DIMENSION, *kernel.cluster)
            attributes += _ATTRIBUTE.pack(_CLUSTER_SCHEDULING, _SPREAD, 0, 0)
        self._attributes = ctypes.create_string_buffer(attributes, max(1, len(attributes)))
        threads = kernel.num_warps * kernel.target.warp_size
        config = (0, 0, 0, threads, 1, 1, kernel.shared, 0, ctypes.addressof(self._attributes))
        count = len(attributes) // _ATTRIBUTE.size
        self._config = ctypes.create_string_buffer(_CONFIG.pack(*config, count), _CONFIG.size)
        self._addresses = (ctypes.addressof(self._config), ctypes.addressof(self._pointers))

    def patch(self, values: Sequence[Value]) -> None:
        """Write the arguments: all in one call, which takes less than to find what changed."""
        place = self._layout
        plain: list[Any] = list(values)
        try:
            for k in place.pointers:
                plain[k] = plain[k].data_ptr()
            for k in place.halves:
                plain[k] = bfloat16_bits(plain[k])
            for k, tile in zip(place.maps, self._launcher.kernel.tensor_maps, strict=True):
                plain[k] = self._launcher.tensor_map(plain[k], tile)
            place.packer.pack_into(self._arguments, 0, *plain, 0, 0)
        except (struct.error, OverflowError, AttributeError, IndexError, TypeError) as error:
            raise self._launcher.complaint(values, error) from None

    def launch(self, grid: Grid, stream: int) -> None:
        """Run the kernel over a grid of programs; an empty grid is no launch."""
        kernel = self._launcher.kernel
        if not (grid[0] and grid[1] and grid[2]):
            return
        _GRID.pack_into(self._config, 0, grid[0] * kernel.cluster[0], grid[1], grid[2])
        _STREAM.pack_into(self._config, _STREAM_OFFSET, stream)
        # Held until the launch returned; then torch reuses it in the order of the stream.
        scratch = self._scratch(grid, stream) if self._launcher.wants_scratch else None
        driver, (config, arguments) = self._launcher.driver, self._addresses
        code = driver.launch(config, self._function, arguments, None)
        if code == _INVALID_CONTEXT:
            driver.bind(self._device)
            code = driver.launch(config, self._function, arguments, None)
        del scratch
        if code:
            raise self._failure(code, grid)

    def _scratch(self, grid: Grid, stream: int) -> list[torch.Tensor]:
        """Memory for the kernel's own use, its addresses written behind the arguments."""
        kernel = self._launcher.kernel
        programs = grid[0] * grid[1] * grid[2] * kernel.cluster[0]
        held = []
        wanted = (kernel.global_scratch, kernel.profile_scratch)
        for scratch, offset in zip(wanted, self._layout.offsets[-2:], strict=True):
            if scratch.size:
                memory = self._launcher.allocate(scratch, programs, self._device, stream)
                address = memory.data_ptr() + -memory.data_ptr() % scratch.alignment
                _STREAM.pack_into(self._arguments, offset, address)
                held.append(memory)
        return held

    def _failure(self, code: int, grid: Grid) -> BackendUnavailable:
        launcher = self._launcher
        large = any(n > limit for n, limit in zip(grid, _GRID_LIMITS, strict=True))
        return BackendUnavailable(
            f"launching `{launcher.kernel.entry}` on GPU {self._device} over a grid of {grid} "
            f"failed: {launcher.driver.error(code)}",
            hint="a grid has at most 2**31 - 1 programs in x and 65535 in y and z"
            if large
            else "an error of an earlier kernel may show here; CUDA_LAUNCH_BLOCKING=1 finds it",
        )


_INVALID_CONTEXT = 201


# Tensor maps that a kernel keeps.
_MOST_MAPS = 4096


class Launcher:
    """A kernel, loaded on each GPU at its first launch there. Safe to share among threads."""

    def __init__(self, kernel: Kernel, driver: Driver | None = None) -> None:
        self.kernel = kernel
        self.layout = layout(kernel.arguments)
        self.wants_scratch = bool(kernel.global_scratch.size or kernel.profile_scratch.size)
        self._driver = driver
        self._functions: dict[int, int] = {}
        self._maps: dict[tuple[Any, ...], bytes] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    @property
    def driver(self) -> Driver:
        if self._driver is None:
            self._driver = cuda_driver()
        return self._driver

    def prepare(self, values: Sequence[Value], index: int | None = None) -> Launch:
        """Set the arguments, in the order of `kernel.arguments`; `index` is the current GPU."""
        if index is None:
            index = self.driver.device()
        try:
            launch: Launch = self._local.launches[index]
        except (AttributeError, KeyError):
            launch = self._first(index)
        launch.patch(values)
        return launch

    def launch(self, grid: Grid, stream: int, values: Sequence[Value]) -> None:
        """Set the arguments and run the kernel."""
        self.prepare(values).launch(grid, stream)

    def _first(self, index: int) -> Launch:
        """A thread's buffers for a GPU, with the kernel loaded there."""
        self.driver.bind(index)
        with self._lock:
            if index not in self._functions:
                self._functions[index] = self.driver.load(self.kernel, index)
        if not hasattr(self._local, "launches"):
            self._local.launches = {}
        launch = Launch(self, self._functions[index], index)
        self._local.launches[index] = launch
        return launch

    def tensor_map(self, x: torch.Tensor, tile: TensorMap) -> bytes:
        """A tensor's map, encoded once: that takes 4 us, and addresses come again."""
        what = (x.data_ptr(), x.shape, x.stride(), tile)
        found = self._maps.get(what)
        if found is None:
            if len(self._maps) >= _MOST_MAPS:
                self._maps.clear()
            found = self._maps[what] = self.driver.tensor_map(x, tile)
        return found

    def clear(self, counter: torch.Tensor, stream: int) -> None:
        """Set a counter [1] to 0 before a launch on this stream: a third of torch.zeros' time."""
        self.driver.clear(counter.data_ptr(), stream)

    def allocate(self, scratch: Scratch, programs: int, index: int, stream: int) -> torch.Tensor:
        """Scratch memory for a launch on a stream."""
        size = scratch.size * programs + scratch.alignment
        memory = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", index))
        if stream != current_stream(index):
            memory.record_stream(_cuda.ExternalStream(stream, index))
        return memory

    def complaint(self, values: Sequence[Value], error: Exception) -> Exception:
        """What is wrong with values that cannot be packed."""
        arguments = self.kernel.arguments
        name = self.kernel.entry
        if len(values) != len(arguments):
            return InputMismatch(
                f"kernel `{name}` takes {len(arguments)} arguments, not {len(values)}"
            )
        for argument, value in zip(arguments, values, strict=True):
            problem = _problem(argument.type, value)
            if problem:
                return InputMismatch(f"argument `{argument.name}` of kernel `{name}` {problem}")
        return error


def _problem(kind: str, value: Value) -> str:
    """What keeps a value from being passed as a type; "" for nothing."""
    if kind.startswith("*") or kind == _TENSOR_MAP:
        return "" if isinstance(value, torch.Tensor) else f"is a pointer, but got {value!r}"
    if isinstance(value, torch.Tensor):
        return f"is a number, {kind}, but got a tensor"
    try:
        struct.pack(f"={_LETTER[kind]}", bfloat16_bits(value) if kind == "bf16" else value)
    except (struct.error, OverflowError, TypeError):
        return f"is {value!r}, which {kind} cannot hold"
    return ""


# -- AMD ---------------------------------------------------------------------------------------


class HipLauncher:
    """The same for AMD, through Triton's own launcher. Not run so far: there was no AMD GPU."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._runs: dict[int, Callable[..., None]] = {}
        self._lock = threading.Lock()

    def launch(self, grid: Grid, stream: int, values: Sequence[Value]) -> None:
        """Set the arguments and run the kernel."""
        index = torch.cuda.current_device()
        with self._lock:
            if index not in self._runs:
                self._runs[index] = hip_launcher(self.kernel, index)
        if grid[0] and grid[1] and grid[2]:
            self._runs[index](grid, stream, values)


def launcher(kernel: Kernel) -> Launcher | HipLauncher:
    """The launcher that suits a kernel's target."""
    return HipLauncher(kernel) if kernel.target.kind == "hip" else Launcher(kernel)
