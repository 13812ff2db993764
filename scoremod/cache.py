"""Compiled kernels in memory and on disk: each is compiled once, and never read back damaged.

    kernel = cache.get_or_compile(cache.key(cache.fingerprint(), text, ...), compile)

One file holds one kernel. Files are written beside their place and renamed into it, so that a
reader sees a whole file or none; a digest over everything is checked before anything is used.
What cannot be stored is compiled again next time, with one warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import stat
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .backends.compile_triton import Kernel, Scratch, TensorMap, triton_version
from .plan_triton import Argument
from .resources import PACKAGE, path
from .target import Target


class CacheWarning(UserWarning):
    """Kernels cannot be stored, and will be compiled again by the next process."""


# -- keys --------------------------------------------------------------------------------------


def key(*parts: object) -> str:
    """The digest of plain values, dataclasses and bytes, told apart by type and place.

    >>> key("a", 1)[:8], key("a", 1.0)[:8]
    ('2657442b', '2562b0fa')
    """
    text = json.dumps(parts, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {type(value).__name__: fields}
    raise TypeError(f"{type(value).__name__} cannot be part of a key")


@functools.cache
def fingerprint() -> str:
    """The digest of what turns a variant into machine code: scoremod's files, and Triton."""
    files = [*PACKAGE.rglob("*.py"), *path("templates").rglob("*"), *path("grammar").rglob("*")]
    digest = hashlib.sha256()
    for file in sorted(f for f in files if f.is_file() and f.suffix != ".pyc"):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode() + content)
    return key(digest.hexdigest(), triton_version(), [os.environ.get(n, "") for n in _SETTINGS])


# With these Triton makes other code from the same text.
_SETTINGS = (
    "TRITON_PTXAS_PATH",
    "TRITON_PTXAS_BLACKWELL_PATH",
    "TRITON_LIBDEVICE_PATH",
    "DISABLE_PTXAS_OPT",
    "TRITON_FORCE_DISABLE_FP_FUSION",
)

# -- one kernel as a file ----------------------------------------------------------------------

MAGIC = b"SCOREMOD"
FORMAT = 1
# Magic, format, lengths of header, image and text; then a digest of this and all that follows it.
_PREFIX = struct.Struct("<8sIIQQ")
_DIGEST = 32


class Damaged(Exception):
    """A file that is not a whole entry of this format."""


def pack(name: str, kernel: Kernel) -> bytes:
    """The file of a kernel; `name` is its key."""
    header = json.dumps({"key": name, **describe(kernel)}, sort_keys=True).encode()
    text = kernel.text.encode()
    prefix = _PREFIX.pack(MAGIC, FORMAT, len(header), len(kernel.image), len(text))
    content = header + kernel.image + text
    return prefix + hashlib.sha256(prefix + content).digest() + content


def unpack(name: str, data: bytes) -> Kernel:
    """The kernel of a file."""
    if len(data) < _PREFIX.size + _DIGEST:
        raise Damaged("too short")
    magic, version, *lengths = _PREFIX.unpack_from(data)
    if magic != MAGIC or version != FORMAT:
        raise Damaged("another format")
    start = _PREFIX.size + _DIGEST
    if len(data) != start + sum(lengths):
        raise Damaged("another length")
    digest = hashlib.sha256(data[: _PREFIX.size] + data[start:]).digest()
    if digest != data[_PREFIX.size : start]:
        raise Damaged("another digest")
    image, text = start + lengths[0], start + lengths[0] + lengths[1]
    try:
        fields = json.loads(data[start:image])
        if fields.pop("key") != name:
            raise Damaged("another key")
        return rebuild(fields, data[image:text], data[text:].decode())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"another header: {error!r}") from None


def describe(kernel: Kernel) -> dict[str, Any]:
    """All of a kernel but its image and text, for JSON."""
    fields = dataclasses.asdict(kernel)
    del fields["image"], fields["text"]
    return fields


def rebuild(fields: dict[str, Any], image: bytes, text: str) -> Kernel:
    """The kernel that `describe` described."""
    fields = {
        **fields,
        "target": Target(**fields["target"]),
        "arguments": tuple(Argument(**a) for a in fields["arguments"]),
        "global_scratch": Scratch(**fields["global_scratch"]),
        "profile_scratch": Scratch(**fields["profile_scratch"]),
        "constants": tuple((name, value) for name, value in fields["constants"]),
        "cluster": tuple(fields["cluster"]),
        "tensor_maps": tuple(_rebuilt_map(**made) for made in fields["tensor_maps"]),
        "notes": tuple(fields["notes"]),
    }
    return Kernel(image=image, text=text, **fields)


def _rebuilt_map(element: str, box: list[int], swizzle: int) -> TensorMap:
    return TensorMap(element, tuple(box), swizzle)


# -- the cache ---------------------------------------------------------------------------------

SUFFIX = ".kernel"
NOTE = ".note.json"
TEMPORARY = "new-"
# Seconds. A write takes milliseconds, so an older temporary file belongs to a dead process.
STALE = 60.0
# How long one process waits for another's compilation before it compiles itself.
LOCK_TIMEOUT = 120.0
DEFAULT_LIMIT = 2**30


@dataclass(frozen=True)
class Entry:
    """A file of the cache."""

    key: str
    size: int
    used: float  # when, in seconds since 1970


class Cache:
    """Kernels by key: in memory, then in a folder, then compiled."""

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        self._folder = folder
        self._limit = limit
        self._kernels: dict[str, Kernel] = {}
        self._guard = threading.Lock()
        self._busy: dict[str, threading.Lock] = {}
        self._compiled = 0
        self._warned = False

    @property
    def folder(self) -> Path:
        """Where entries are: SCOREMOD_CACHE_DIR, else the user's cache folder."""
        if self._folder is not None:
            return self._folder
        if chosen := os.environ.get("SCOREMOD_CACHE_DIR"):
            return Path(chosen)
        import platformdirs

        return Path(platformdirs.user_cache_dir("scoremod", appauthor=False))

    @property
    def limit(self) -> int:
        """The most bytes on disk: SCOREMOD_CACHE_SIZE, such as 500M, else 1 GiB."""
        if self._limit is not None:
            return self._limit
        return _bytes(os.environ.get("SCOREMOD_CACHE_SIZE", ""))

    def get_or_compile(self, name: str, build: Callable[[], Kernel]) -> Kernel:
        """The kernel of a key; threads and processes that ask together compile it once."""
        found = self._kernels.get(name)
        if found is not None:
            return found
        with self._guard:
            lock = self._busy.setdefault(name, threading.Lock())
        with lock:
            found = self._kernels.get(name) or self._read(name)
            if found is None:
                with self._alone(name):
                    found = self._read(name) or self._compile(name, build)
            self._kernels[name] = found
        with self._guard:
            self._busy.pop(name, None)
        return found

    def find(self, name: str) -> Kernel | None:
        """The kernel of a key, if it was compiled before."""
        return self._kernels.get(name) or self._read(name)

    def _compile(self, name: str, build: Callable[[], Kernel]) -> Kernel:
        kernel = build()
        with self._guard:
            self._compiled += 1
        self._write(name, kernel)
        return kernel

    def compile_count(self) -> int:
        """How many kernels were really compiled."""
        return self._compiled

    def forget(self) -> None:
        """Empty the memory, not the folder."""
        self._kernels.clear()

    # -- files ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Keep other processes from compiling the same, if the folder allows it."""
        import filelock

        with contextlib.ExitStack() as stack:
            # 256 files for all keys: they are never deleted, since that cannot be done safely.
            with contextlib.suppress(OSError, NotImplementedError, filelock.Timeout):
                self._make_folder()
                file = self.folder / f"{name[:2]}.lock"
                stack.enter_context(filelock.FileLock(file, timeout=LOCK_TIMEOUT, mode=0o600))
            yield

    def _make_folder(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def _read(self, name: str) -> Kernel | None:
        """An entry, which is then the one used last."""
        kernel = self._checked(name)
        if kernel is not None:
            with contextlib.suppress(OSError):
                os.utime(self.folder / f"{name}{SUFFIX}")
        return kernel

    def _checked(self, name: str) -> Kernel | None:
        """An entry; damaged ones are deleted, and those that others may write are ignored."""
        file = self.folder / f"{name}{SUFFIX}"
        try:
            return unpack(name, own_bytes(file))
        except OSError:
            return None
        except Damaged:
            _delete(file)
            return None

    def _write(self, name: str, kernel: Kernel) -> None:
        try:
            self._place(f"{name}{SUFFIX}", pack(name, kernel))
            self._tidy(name)
        except OSError as error:
            self._warn(error)

    def _place(self, name: str, content: bytes) -> None:
        """Write a file beside its place and rename it into it."""
        self._make_folder()
        handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=self.folder)
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, self.folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _warn(self, error: OSError) -> None:
        with self._guard:
            first, self._warned = not self._warned, True
        if first:
            warnings.warn(
                f"kernels cannot be stored in {self.folder} and will be compiled again by the next "
                f"process: {error}; SCOREMOD_CACHE_DIR names another folder",
                CacheWarning,
                stacklevel=2,
            )

    def _tidy(self, newest: str) -> None:
        """Keep the folder below its limit: entries used longest ago go first."""
        self._delete_stale()
        entries = self.entries()
        excess = sum(e.size for e in entries) - self.limit
        for entry in entries:
            if excess > 0 and entry.key != newest:
                _delete(self.folder / f"{entry.key}{SUFFIX}")
                excess -= entry.size

    def _delete_stale(self) -> None:
        """Delete what processes left that died while they wrote."""
        for file, status in self._files():
            if file.name.startswith(TEMPORARY) and time.time() - status.st_mtime > STALE:
                _delete(file)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """The folder's files; others may delete some meanwhile."""
        try:
            names = sorted(os.listdir(self.folder))
        except OSError:
            return
        for name in names:
            with contextlib.suppress(OSError):
                yield self.folder / name, os.stat(self.folder / name)

    # -- notes ---------------------------------------------------------------------------------

    def note(self, name: str) -> dict[str, Any] | None:
        """What was noted of a key, such as the configuration that was measured to be best."""
        try:
            found = json.loads(own_bytes(self.folder / f"{name}{NOTE}"))
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) and found.get("key") == name else None

    def put_note(self, name: str, fields: Mapping[str, Any]) -> None:
        """Note facts of a key, in place of older ones; OSError where the folder takes no files."""
        content = json.dumps({"key": name, **fields}, sort_keys=True, indent=1)
        self._place(f"{name}{NOTE}", content.encode())

    # -- for people ----------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """The entries on disk, those used longest ago first."""
        found = [
            Entry(file.name.removesuffix(SUFFIX), status.st_size, status.st_mtime)
            for file, status in self._files()
            if file.name.endswith(SUFFIX)
        ]
        return sorted(found, key=lambda entry: (entry.used, entry.key))

    def size(self) -> int:
        """Bytes on disk."""
        return sum(entry.size for entry in self.entries())

    def clear(self) -> int:
        """Delete entries and notes, and empty the memory; gives how many entries there were."""
        self.forget()
        self._delete_stale()
        for file, _ in self._files():
            if file.name.endswith(NOTE):
                _delete(file)
        return sum(_delete(self.folder / f"{e.key}{SUFFIX}") for e in self.entries())

    def verify(self) -> list[str]:
        """The keys of entries that are of no use; damaged ones are deleted."""
        return [e.key for e in self.entries() if self._checked(e.key) is None]


def own_bytes(file: Path) -> bytes:
    """A file's content, if only its owner can write it, and that is the user or root."""
    # Without waiting: a pipe of that name would keep its reader for ever.
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(file, os.O_RDONLY | flags)
    with open(handle, "rb") as opened:
        status = os.fstat(handle)
        owners = (os.getuid(), 0) if hasattr(os, "getuid") else (status.st_uid,)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in owners:
            raise PermissionError(f"{file} belongs to somebody else")
        if os.name == "posix" and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"others can write {file}")
        return opened.read()


def _delete(file: Path) -> bool:
    with contextlib.suppress(OSError):
        file.unlink()
        return True
    return False


def _bytes(words: str) -> int:
    """A number of bytes such as 1000000, 500M or 2G."""
    number, unit = words.rstrip("KMGkmg"), words[-1:].upper()
    try:
        return int(float(number) * {"K": 2**10, "M": 2**20, "G": 2**30}.get(unit, 1))
    except ValueError:
        return DEFAULT_LIMIT


# -- the cache of this process -----------------------------------------------------------------

CACHE = Cache()
get_or_compile = CACHE.get_or_compile
compile_count = CACHE.compile_count
forget = CACHE.forget
entries = CACHE.entries
size = CACHE.size
clear = CACHE.clear
verify = CACHE.verify
