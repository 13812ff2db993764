"""The kernel cache: one compilation per key, and right answers whatever happens to its files."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scoremod import cache
from scoremod.backends.compile_triton import Kernel, Scratch, TensorMap
from scoremod.cache import SUFFIX, Cache, CacheWarning, Damaged, key, pack, unpack
from scoremod.plan_triton import Argument
from scoremod.target import Target

ROOT = Path(__file__).parent.parent


def kernel(number: int = 0, size: int = 1000) -> Kernel:
    """A kernel that tells by its image which one it is."""
    return Kernel(
        entry="attention_fwd",
        target=Target("cuda", "90", 227 * 1024),
        image=number.to_bytes(8, "big") * (size // 8),
        arguments=(Argument("q", "*bf16"), Argument("q_len", "i32")),
        global_scratch=Scratch(0, 1),
        profile_scratch=Scratch(128, 16),
        constants=(("BLOCK_M", 64),),
        num_warps=4,
        cluster=(2, 1, 1),
        shared=1024,
        registers=255,
        spills=0,
        text=f"# kernel {number}\n",
        triton="3.6.0",
        tensor_maps=(TensorMap("bf16", (1, 1, 64, 64), 3),),
        notes=("128 queries by 128 keys: taken",),
    )


def never() -> Kernel:
    raise AssertionError("compiled again")


NAME = key("a kernel")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        yield


# -- memory, disk, compile ---------------------------------------------------------------------


def test_a_kernel_is_compiled_once_then_found_in_memory_then_on_disk(folder: Path) -> None:
    first = Cache(folder)
    assert first.get_or_compile(NAME, kernel) == kernel()
    assert first.get_or_compile(NAME, never) is first.get_or_compile(NAME, never)
    second = Cache(folder)
    assert second.get_or_compile(NAME, never) == kernel()
    assert (first.compile_count(), second.compile_count()) == (1, 0)


def test_forget_leaves_the_folder_and_clear_does_not(folder: Path) -> None:
    here = Cache(folder)
    here.get_or_compile(NAME, kernel)
    here.forget()
    here.get_or_compile(NAME, never)
    assert here.size() == len(pack(NAME, kernel())) > 0
    assert [e.key for e in here.entries()] == [NAME]
    assert here.verify() == []
    assert here.clear() == 1
    assert here.entries() == [] and here.size() == 0
    here.get_or_compile(NAME, kernel)
    assert here.compile_count() == 2


def test_a_failed_compilation_is_tried_again(folder: Path) -> None:
    here = Cache(folder)
    for _ in range(2):
        with pytest.raises(AssertionError, match="compiled again"):
            here.get_or_compile(NAME, never)
    assert here.get_or_compile(NAME, kernel) == kernel()
    assert here.compile_count() == 1


def test_folder_and_files_belong_to_the_user_alone(folder: Path) -> None:
    Cache(folder).get_or_compile(NAME, kernel)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / f"{NAME}{SUFFIX}").stat().st_mode & 0o777 == 0o600


def test_the_environment_names_folder_and_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCOREMOD_CACHE_DIR", str(folder))
    for words, size in {"": 2**30, "1000": 1000, "5k": 5120, "1.5G": 3 * 2**29}.items():
        monkeypatch.setenv("SCOREMOD_CACHE_SIZE", words)
        assert Cache().limit == size
    assert Cache().folder == folder
    monkeypatch.delenv("SCOREMOD_CACHE_DIR")
    assert Cache().folder.name == "scoremod"


def test_keys_tell_values_apart() -> None:
    target = Target("cuda", "90", 1)
    parts = ["a", b"a", 1, 1.0, True, None, ("a", 1), ("a1",), {"a": 1}, target]
    assert len({key(part) for part in parts}) == len(parts)
    assert key("ab", "c") != key("a", "bc")
    assert key(target) == key(Target("cuda", "90", 1))
    with pytest.raises(TypeError, match="object cannot be part of a key"):
        key(object())


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    # Without the rest of scoremod, whose import takes seconds.
    code = """if True:
        import sys, types
        sys.modules["scoremod"] = package = types.ModuleType("scoremod")
        package.__path__ = ["scoremod"]
        from scoremod import cache
        print(cache.fingerprint(), "triton" in sys.modules, "torch" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == [cache.fingerprint(), "False", "False"], done.stderr


# -- the file format ---------------------------------------------------------------------------

WORDS = st.text(max_size=20)
NUMBERS = st.integers(0, 2**40)
SCRATCH = st.builds(Scratch, NUMBERS, NUMBERS)
KERNELS = st.builds(
    Kernel,
    entry=WORDS,
    target=st.builds(Target, st.sampled_from(["cuda", "hip"]), WORDS, NUMBERS, NUMBERS),
    image=st.binary(max_size=300),
    arguments=st.lists(st.builds(Argument, WORDS, WORDS), max_size=4).map(tuple),
    global_scratch=SCRATCH,
    profile_scratch=SCRATCH,
    constants=st.just((("BLOCK_M", 64), ("BLOCK_N", 32))),
    num_warps=NUMBERS,
    cluster=st.tuples(NUMBERS, NUMBERS, NUMBERS),
    shared=NUMBERS,
    registers=NUMBERS,
    spills=NUMBERS,
    text=st.text(max_size=300),
    triton=WORDS,
)


@settings(max_examples=50)
@given(KERNELS)
def test_what_is_packed_is_unpacked(some: Kernel) -> None:
    assert unpack(NAME, pack(NAME, some)) == some


@given(st.binary(max_size=200))
def test_no_file_of_anything_is_a_kernel(data: bytes) -> None:
    for content in (data, pack(NAME, kernel(size=8))[:40] + data, cache.MAGIC + data):
        with pytest.raises(Damaged):
            unpack(NAME, content)


@settings(max_examples=300)
@given(st.data())
def test_every_flipped_bit_and_every_cut_is_noticed(data: st.DataObject) -> None:
    good = pack(NAME, kernel(size=64))
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    flipped = bytearray(good)
    flipped[bit // 8] ^= 1 << bit % 8
    cut = good[: data.draw(st.integers(0, len(good) - 1))]
    for bad in (bytes(flipped), cut, good + b"\0"):
        with pytest.raises(Damaged):
            unpack(NAME, bad)


# -- damaged and foreign entries ---------------------------------------------------------------


def damages() -> dict[str, bytes]:
    """A good file, damaged in each of its regions."""
    good = pack(NAME, kernel())
    places = {"magic": 3, "format": 9, "length": 14, "digest": 40, "header": 80, "text": -1}
    places["image"] = len(good) - len(kernel().text) - 4
    found = {}
    for where, place in places.items():
        flipped = bytearray(good)
        flipped[place] ^= 4
        found[f"flipped {where}"] = bytes(flipped)
    for length in (0, 7, 30, 63, 64, 300, len(good) - 1):
        found[f"cut at {length}"] = good[:length]
    found["longer"] = good + good
    found["another kernel's"] = pack(key("another"), kernel(7))
    found["zeros"] = bytes(len(good))
    return found


@pytest.mark.parametrize("damage", damages())
def test_a_damaged_entry_is_replaced(folder: Path, damage: str) -> None:
    Cache(folder).get_or_compile(NAME, kernel)
    file = folder / f"{NAME}{SUFFIX}"
    file.write_bytes(damages()[damage])
    here = Cache(folder)
    assert here.get_or_compile(NAME, kernel) == kernel()
    assert here.compile_count() == 1
    assert file.read_bytes() == pack(NAME, kernel())


def test_an_entry_of_another_version_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "FORMAT", 99)
    Cache(folder).get_or_compile(NAME, kernel)
    monkeypatch.undo()
    here = Cache(folder)
    assert here.get_or_compile(NAME, lambda: kernel(1)) == kernel(1)
    assert here.verify() == []


def test_an_entry_with_other_fields_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = {**cache.describe(kernel()), "colour": "red"}
    monkeypatch.setattr(cache, "describe", lambda _: described)
    Cache(folder).get_or_compile(NAME, kernel)
    monkeypatch.undo()
    assert Cache(folder).verify() == [NAME]
    assert Cache(folder).entries() == []


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_an_entry_that_others_can_write_is_not_trusted(folder: Path, mode: int) -> None:
    Cache(folder).get_or_compile(NAME, kernel)
    (folder / f"{NAME}{SUFFIX}").chmod(mode)
    assert Cache(folder).get_or_compile(NAME, lambda: kernel(1)) == kernel(1)


def test_an_entry_of_somebody_else_is_not_trusted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cache(folder).get_or_compile(NAME, kernel)
    file = folder / f"{NAME}{SUFFIX}"
    target = folder / "elsewhere"
    file.rename(target)
    file.symlink_to(target)
    assert Cache(folder).get_or_compile(NAME, lambda: kernel(1)) == kernel(1)
    status = os.stat(file)
    other = os.stat_result([*status[:4], 12345, *status[5:]])
    monkeypatch.setattr(os, "fstat", lambda _: other)
    assert Cache(folder).verify() == [NAME]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no pipes with names")
def test_a_pipe_in_place_of_an_entry_is_not_waited_for(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / f"{NAME}{SUFFIX}")
    assert Cache(folder).get_or_compile(NAME, kernel) == kernel()


# -- folders that cannot be written ------------------------------------------------------------


def one_warning(here: Cache) -> None:
    """Two kernels are compiled and kept in memory, with one warning in all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            name = key(number)
            assert here.get_or_compile(name, lambda n=number: kernel(n)) == kernel(number)
            assert here.get_or_compile(name, never) == kernel(number)
    assert [w.category for w in caught] == [CacheWarning]
    assert "SCOREMOD_CACHE_DIR" in str(caught[0].message)


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    one_warning(Cache(tmp_path / "file" / "cache"))


def refuse(number: int):
    def call(*_: object, **__: object):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_a_folder_without_new_files_is_one_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder.mkdir()
    Cache(folder).get_or_compile(NAME, kernel)
    monkeypatch.setattr(tempfile, "mkstemp", refuse(number))
    monkeypatch.setattr(os, "utime", refuse(number))
    one_warning(Cache(folder))
    # What is there is still read.
    assert Cache(folder).get_or_compile(NAME, never) == kernel()


def test_a_disk_that_fills_up_is_one_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, handle: int, *_: object) -> None:
            self.handle = handle

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            os.close(self.handle)

        def write(self, data: bytes) -> None:
            os.write(self.handle, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    def opener(handle: int, mode: str):
        return Full(handle) if mode == "wb" else open(handle, mode)

    monkeypatch.setattr(cache, "open", opener, raising=False)
    one_warning(Cache(folder))
    assert [f.name for f in folder.iterdir() if not f.name.endswith(".lock")] == []


@pytest.mark.skipif(not hasattr(os, "fork") or os.getuid() != 0, reason="root becomes nobody")
def test_a_read_only_folder_is_one_warning(tmp_path: Path) -> None:
    # pytest's folders are closed to others.
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        Cache(place).get_or_compile(NAME, kernel)
        (place / f"{NAME}{SUFFIX}").chmod(0o644)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setuid(65534)
                one_warning(Cache(place))
                assert Cache(place).get_or_compile(NAME, never) == kernel()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0


# -- many at once ------------------------------------------------------------------------------


def test_threads_compile_a_kernel_once(folder: Path) -> None:
    here, found = Cache(folder), []
    start = threading.Barrier(16)

    def slow() -> Kernel:
        time.sleep(0.1)
        return kernel()

    def ask(number: int) -> None:
        start.wait()
        found.append(here.get_or_compile(key(number % 2), slow))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert here.compile_count() == 2 and len({id(k) for k in found}) == 2


def forked(count: int, work) -> list[int]:
    """Run work(number) in processes of their own; gives their exit codes."""
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            code = 99
            try:
                code = work(number)
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@needs_fork
def test_cold_processes_compile_a_kernel_once(folder: Path) -> None:
    def work(_: int) -> int:
        here = Cache(folder)

        def slow() -> Kernel:
            time.sleep(0.3)
            return kernel()

        assert here.get_or_compile(NAME, slow) == kernel()
        return here.compile_count()

    assert sorted(forked(8, work)) == [0] * 7 + [1]
    assert [e.key for e in Cache(folder).entries()] == [NAME]


@needs_fork
def test_32_processes_fill_one_folder(folder: Path) -> None:
    names = [key(n) for n in range(40)]

    def work(number: int) -> int:
        here = Cache(folder)
        for step in range(40):
            n = (step * 7 + number) % 40
            assert here.get_or_compile(names[n], lambda n=n: kernel(n, 20_000)) == kernel(n, 20_000)
        return here.compile_count()

    counts = forked(32, work)
    assert sum(counts) == 40 and 99 not in counts
    here = Cache(folder)
    assert sorted(e.key for e in here.entries()) == sorted(names) and here.verify() == []


@needs_fork
def test_32_processes_share_a_folder_too_small_for_them(folder: Path) -> None:
    names = [key(n) for n in range(12)]
    limit = 5 * len(pack(names[0], kernel(0, 20_000)))

    def work(number: int) -> int:
        for step in range(12):
            n = (step * 5 + number) % 12
            here = Cache(folder, limit)
            assert here.get_or_compile(names[n], lambda n=n: kernel(n, 20_000)) == kernel(n, 20_000)
        return 0

    assert set(forked(32, work)) == {0}
    here = Cache(folder, limit)
    here.get_or_compile(key("last"), kernel)
    assert here.size() <= limit and here.verify() == []


@needs_fork
def test_kill_in_mid_write_leaves_nothing_damaged(folder: Path) -> None:
    names = [key(n) for n in range(4)]

    def write_for_ever(number: int) -> int:
        while True:
            n = number % 4
            Cache(folder)._write(names[n], kernel(n, 100_000))
            number += 1

    def left() -> list[Path]:
        return [f for f in folder.iterdir() if f.name.startswith(cache.TEMPORARY)]

    for attempt in range(1000):
        if attempt >= 100 and left():
            break
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(attempt)
            finally:
                os._exit(99)
        # From before the first write to the middle of a later one; a busy machine takes longer.
        time.sleep(attempt % 20 * 0.0005 * (1 + attempt // 100))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for entry in Cache(folder).entries():
            n = names.index(entry.key)
            assert (
                unpack(names[n], (folder / f"{entry.key}{SUFFIX}").read_bytes()).text
                == f"# kernel {n}\n"
            )
    here = Cache(folder)
    killed = left()
    for file in killed:
        os.utime(file, (0, 0))
    for n, name in enumerate(names):
        assert here.get_or_compile(name, lambda n=n: kernel(n, 100_000)) == kernel(n, 100_000)
    here.get_or_compile(NAME, kernel)
    assert killed and here.verify() == [] and not left()


@needs_fork
def test_a_process_that_waits_too_long_compiles_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LOCK_TIMEOUT", 0.1)
    here, other = Cache(folder), Cache(folder)
    with other._alone(NAME):
        assert here.get_or_compile(NAME, kernel) == kernel()


# -- the size limit ----------------------------------------------------------------------------


def test_the_least_recently_used_go_first(folder: Path) -> None:
    names = [key(n) for n in range(6)]
    one = len(pack(names[0], kernel(0)))
    here = Cache(folder, limit=4 * one + 10)
    for n, name in enumerate(names[:4]):
        here.get_or_compile(name, lambda n=n: kernel(n))
        os.utime(folder / f"{name}{SUFFIX}", (1000 + n, 1000 + n))
    Cache(folder).get_or_compile(names[0], never)  # used again
    for n in (4, 5):
        here.get_or_compile(names[n], lambda n=n: kernel(n))
    left = {e.key for e in here.entries()}
    assert left == {names[0], names[3], names[4], names[5]}
    assert here.size() <= here.limit


def test_what_was_just_written_stays_whatever_the_limit(folder: Path) -> None:
    here = Cache(folder, limit=1)
    for n in range(3):
        here.get_or_compile(key(n), lambda n=n: kernel(n))
        assert [e.key for e in here.entries()] == [key(n)]


def test_only_old_temporary_files_are_deleted(folder: Path) -> None:
    folder.mkdir()
    old, young = folder / f"{cache.TEMPORARY}old", folder / f"{cache.TEMPORARY}young"
    old.write_bytes(b"half")
    young.write_bytes(b"half")
    os.utime(old, (1, 1))
    Cache(folder).get_or_compile(NAME, kernel)
    assert not old.exists() and young.exists()
