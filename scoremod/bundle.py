"""Bundles: a variant's kernels in one file, for machines without Triton, compiler or source.

manifest.json                                   what is in it: text, captures, kernels, launch ABI
kernels/attention_fwd-cuda90-1f0c73a9.cubin     machine code
kernels/attention_fwd-cuda90-1f0c73a9.py        the text that it was compiled from

A zip of stored entries. Its comment is the digest of all bytes before it, so that a file that was
changed, or cut short, is found out before anything in it is used.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from .backends.compile_triton import Kernel
from .cache import describe, key, own_bytes, rebuild
from .errors import BackendUnavailable, BundleInvalid, KernelMissing
from .frontend.parsed import as_data, from_data
from .frontend.source import TextSource
from .plan_triton import Options, Reach
from .plan_triton_backward import Learned, Rows
from .target import Target

# Of the manifest and of the order of the kernels' arguments: a change of either is a new format.
FORMAT = 4
SUFFIX = ".smk"
MANIFEST = "manifest.json"
_IMAGE = {"cuda": "cubin", "hip": "hsaco"}
# zipfile can store no earlier time than this.
_TIME = (1980, 1, 1, 0, 0, 0)
_DIGEST = 64  # characters of the comment
_LAST, _END = b"PK\x05\x06", 22  # a zip's last record: how it begins, its bytes before the comment

# -- which kernel serves which call ------------------------------------------------------------

# What a kernel promises less than others, and serves their calls too, only slower.
WEAKER = {
    "small": False,
    "wide_offsets": True,
    "aligned": False,
    "even": False,
    "short": False,
    "positive_scale": False,
    "coarse": False,
}


@dataclass(frozen=True)
class Kind:
    """What decides a kernel: what no other can stand in for, and what it was specialised for."""

    family: str  # a digest
    promises: tuple[tuple[str, bool], ...]

    @staticmethod
    def of(what: Sequence[object], target: Target) -> Kind:
        """The kind of the kernel that `what` decides."""
        promises: dict[str, bool] = {}
        rest = [_without_promises(x, promises) for x in what]
        family = key(f"{target.kind}:{target.arch}", rest)
        return Kind(family, tuple(sorted(promises.items())))

    def serves(self, other: Kind) -> bool:
        """Whether a kernel of this kind computes what one of the other would."""
        pairs = zip(self.promises, other.promises, strict=True)
        return self.family == other.family and all(
            mine in (theirs, WEAKER[name]) for (name, mine), (_, theirs) in pairs
        )

    def distance(self, other: Kind) -> int:
        """In how many promises the two differ."""
        return sum(a != b for a, b in zip(self.promises, other.promises, strict=True))


def _without_promises(value: object, promises: dict[str, bool]) -> object:
    """A part of what decides a kernel; its promises are taken out."""
    if isinstance(value, tuple):
        return [_without_promises(x, promises) for x in value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    found = {f.name: getattr(value, f.name) for f in fields(value)}
    promises |= {name: x for name, x in found.items() if name in WEAKER}
    rest = {n: _without_promises(x, promises) for n, x in found.items() if n not in WEAKER}
    return {type(value).__name__: rest}


# -- a bundle's contents -----------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """A kernel for a bundle, or why there is none."""

    what: tuple[object, ...]
    target: Target
    call: str  # the kind of call that it is for, in words
    result: Kernel | str

    @property
    def kind(self) -> Kind:
        return Kind.of(self.what, self.target)

    @property
    def stem(self) -> str:
        """What its files are called."""
        kind = self.kind
        words = f"{self.what[0]}-{self.target.kind}{self.target.arch}"
        return f"kernels/{words}-{key(kind.family, kind.promises)[:12]}"


@dataclass(frozen=True)
class Title:
    """What a bundle is of."""

    variant: TextSource  # in the mini-language
    captures: tuple[str, ...]  # declarations
    source: tuple[str, ...]  # the user's own words


def require_folder(path: str | Path) -> None:
    """Raise where a bundle could not be written, before minutes are spent on it."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise BundleInvalid(f"cannot write {path}: there is no folder {folder}")


def write(path: str | Path, title: Title, items: Iterable[Item]) -> None:
    """Write a bundle: beside its place, then renamed into it."""
    data = pack(_entries(title, sorted(items, key=lambda item: item.stem)))
    place = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=place.parent)
        try:
            with open(handle, "wb") as file:
                file.write(data)
            # For all to read; `load` takes none that others could have written.
            os.chmod(temporary, 0o644)
            os.replace(temporary, place)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise BundleInvalid(f"cannot write {place}: {error.strerror}") from None


def _entries(title: Title, items: Sequence[Item]) -> dict[str, bytes]:
    entries: dict[str, bytes] = {}
    for item in items:
        if isinstance(item.result, Kernel):
            image, text = _files(item)
            entries[image], entries[text] = item.result.image, item.result.text.encode()
    manifest = {
        "format": FORMAT,
        "scoremod": _version("scoremod"),
        "triton": _version("triton"),
        "name": title.variant.name,
        "text": title.variant.text,
        "parsed": as_data(title.variant),
        "captures": title.captures,
        "source": title.source,
        "kernels": [_record(item) for item in items],
        "digests": {name: hashlib.sha256(x).hexdigest() for name, x in entries.items()},
    }
    text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False)
    return {**entries, MANIFEST: text.encode()}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _record(item: Item) -> dict[str, Any]:
    """What the manifest says of a kernel."""
    kind = item.kind
    found: dict[str, Any] = {
        "kernel": item.what[0],
        "target": f"{item.target.kind}:{item.target.arch}",
        "call": item.call,
        "made_for": made_for(item.what),
        "params": params_of(item.what),
        "family": kind.family,
        "promises": dict(kind.promises),
    }
    if isinstance(item.result, str):
        return {**found, "refused": item.result}
    image, text = _files(item)
    return {**found, "image": image, "source": text, "launch": describe(item.result)}


def _files(item: Item) -> tuple[str, str]:
    return f"{item.stem}.{_IMAGE[item.target.kind]}", f"{item.stem}.py"


# -- in words ----------------------------------------------------------------------------------

STRUCTURE = "tile_structure"  # which may be transposed


def made_for(what: Sequence[object]) -> str:
    """What decides a kernel, as far as no other can stand in for it."""
    words = [word for part in what for word in _words(part)]
    if what[0] == STRUCTURE and what[-1] is True:
        words.append("transposed")
    return ", ".join(words) or "every dtype"


def _words(part: object) -> list[str]:
    match part:
        case Options():
            return [*_shape(part), *_needs(part)]
        case Reach():
            return _needs(part)
        case Rows():
            return [part.dtype, f"head dim {part.v_head_dim}"]
        case (int(), int()):
            return [f"tiles of {part[0]} x {part[1]}"]
        case (Learned(), *_):
            positions = ", ".join(str(x.position) for x in part)  # type: ignore[attr-defined]
            return [f"gradients of captures {positions}"]
    return []


def _shape(options: Options) -> list[str]:
    dims = f"head dim {options.head_dim}"
    if options.v_head_dim != options.head_dim:
        dims = f"head dims {options.head_dim} and {options.v_head_dim}"
    usual = "exact" if options.dtype == "f32" else "fast"
    odd = [] if options.precision == usual else [f"precision {options.precision!r}"]
    return [options.dtype, dims, *odd]


def _needs(options: Options | Reach) -> list[str]:
    """What makes a kernel take other arguments."""
    return [word for name, word in _NEEDS.items() if getattr(options, name, False)]


_NEEDS = {
    "has_kv_lens": "kv_lens",
    "offset_per_batch": "q_offset as a tensor",
    "scale_in_memory": "scale as a tensor",
    "blocks": "a list of blocks in tiles=",
}
# What `also` of `build` adds, by words of `made_for`.
_ALSO = {
    "a list of blocks": "blocks",
    "precision 'exact'": "exact",
    "q_offset as a tensor": "offsets",
    "scale as a tensor": "scale",
}


def params_of(what: Sequence[object]) -> tuple[str, ...]:
    """The types of the captures in what decides a kernel."""
    canonical = what[1]
    if not isinstance(canonical, tuple):
        return ()
    return tuple(
        f"{element}[{rank}-d]" if kind == "tensor" else element if by_value else f"0-d {element}"
        for kind, element, rank, by_value in canonical[-1]
    )


def _captures(params: Sequence[str]) -> str:
    return f", captures {', '.join(params)}" if params else ""


# -- the file ----------------------------------------------------------------------------------


def pack(entries: Mapping[str, bytes]) -> bytes:
    """The file: the same bytes for the same entries, wherever and whenever it is written."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for name in sorted(entries):
            info = zipfile.ZipInfo(name, _TIME)
            info.create_system, info.external_attr = 3, 0o644 << 16  # else the platform's
            file.writestr(info, entries[name])
        file.comment = b" " * _DIGEST
    body = buffer.getvalue()[:-_DIGEST]
    return body + hashlib.sha256(body).hexdigest().encode()


# -- reading -----------------------------------------------------------------------------------


@dataclass
class Bundle:
    """A bundle in memory. Kernels are taken out where they are first asked for."""

    file: str
    digest: str
    manifest: Mapping[str, Any]
    data: bytes = field(repr=False)
    _found: dict[Kind, Kernel] = field(default_factory=dict, repr=False)

    @property
    def records(self) -> list[Mapping[str, Any]]:
        """What the manifest says of each kernel."""
        return self.manifest["kernels"]  # type: ignore[no-any-return]

    @property
    def variant(self) -> TextSource:
        """The variant, as it was compiled."""
        return from_data(self.manifest["parsed"], self.file)

    @property
    def targets(self) -> list[str]:
        return sorted({r["target"] for r in self.records})

    def kernel(self, what: tuple[object, ...], target: Target) -> Kernel:
        """The kernel that `what` decides, or one that serves as well."""
        asked = Kind.of(what, target)
        found = self._found.get(asked)
        if found is None:
            found = self._found[asked] = self._taken_out(self._record(asked, what, target))
        return found

    def _record(self, asked: Kind, what: tuple[object, ...], target: Target) -> Mapping[str, Any]:
        kinds = [(_kind_of(record), record) for record in self.records]
        fitting = [(kind, record) for kind, record in kinds if kind.serves(asked)]
        if not fitting:
            raise self._missing(what, f"{target.kind}:{target.arch}")
        record = min(fitting, key=lambda found: found[0].distance(asked))[1]
        if "refused" in record:
            raise BackendUnavailable(record["refused"])
        return record

    def _missing(self, what: tuple[object, ...], target: str) -> KernelMissing:
        if target not in self.targets:
            return KernelMissing(
                f"{self.file} has kernels for {', '.join(self.targets)}, not for this GPU, "
                f"{target}",
                hint=f"build it for {target} too: .build(path, target=[..., {target!r}], ...)",
            )
        entry = what[0]
        same = [r for r in self.records if (r["kernel"], r["target"]) == (entry, target)]
        calls: dict[str, list[str]] = {}
        for r in same:
            calls.setdefault(f"{r['made_for']}{_captures(r['params'])}", []).append(r["call"])
        has = [f"{words} ({', '.join(sorted(found))})" for words, found in sorted(calls.items())]
        needed = made_for(what)
        also = [f"also={word!r}" for words, word in _ALSO.items() if words in needed]
        asked = f"build it with {' and '.join(also)}; " if also else ""
        return KernelMissing(
            f"{self.file} has no kernel `{entry}` for this call on {target}: "
            f"{needed}{_captures(params_of(what))}",
            hint=f"{asked}it has it for: {'; '.join(has)}"
            if has
            else f"it has {', '.join(sorted({r['kernel'] for r in self.records}))}; "
            "gradients need phase='bwd' when it is built",
        )

    def _taken_out(self, record: Mapping[str, Any]) -> Kernel:
        with zipfile.ZipFile(io.BytesIO(self.data)) as file:
            image, text = file.read(record["image"]), file.read(record["source"])
        return rebuild(dict(record["launch"]), image, text.decode())


def _kind_of(record: Mapping[str, Any]) -> Kind:
    return Kind(record["family"], tuple(sorted(record["promises"].items())))


def unpack(data: bytes, file: str) -> Bundle:
    """The bundle in a file's bytes, its digest checked first."""
    body, digest = data[:-_DIGEST], data[-_DIGEST:]
    length = _DIGEST.to_bytes(2, "little")
    if body[-_END:][:4] != _LAST or body[-2:] != length:
        raise BundleInvalid(f"{file} {_not_whole(data)}")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise BundleInvalid(
            f"{file} is not as it was written: its digest is another",
            hint="copy it again, or build it again",
        )
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        if MANIFEST not in opened.namelist():
            raise BundleInvalid(f"{file} is no bundle: it has no {MANIFEST}")
        manifest = json.loads(opened.read(MANIFEST))
    if manifest.get("format") != FORMAT:
        raise BundleInvalid(
            f"{file} has format {manifest.get('format')}; this scoremod reads format {FORMAT}",
            hint=f"it was built by scoremod {manifest.get('scoremod', '')}: build it again, or "
            "install that one",
        )
    return Bundle(file, digest.decode(), manifest, data)


def _not_whole(data: bytes) -> str:
    """What a file is that does not end as a bundle does."""
    if not data.startswith(b"PK\x03\x04"):
        return "is no bundle: it is not even a zip file"
    end = data.rfind(_LAST)
    comment = data[end + _END :]
    said = int.from_bytes(data[end + _END - 2 : end + _END], "little")
    if end < 0 or len(comment) < said:
        return "is cut short"
    return "is a zip file, but no bundle"


def read(path: str | Path) -> Bundle:
    """The bundle in a file that only its owner can write, who is the user or root."""
    try:
        # A link that the user names is followed; what it leads to is what must be safe.
        return unpack(own_bytes(Path(path).resolve()), str(path))
    except FileNotFoundError:
        raise BundleInvalid(f"there is no file {path}") from None
    except IsADirectoryError:
        raise BundleInvalid(f"{path} is a folder, not a bundle") from None
    except OSError as error:
        hint = "chmod go-w it, if you trust it" if "can write" in str(error) else None
        raise BundleInvalid(f"{path} is not read: {error}", hint=hint) from None


# -- the bundles of this process ---------------------------------------------------------------

_LOADED: dict[str, Bundle] = {}


def load(path: str | Path) -> Bundle:
    """Read a bundle and let its kernels be found."""
    found = read(path)
    return _LOADED.setdefault(found.digest, found)


def loaded(digest: str) -> Bundle:
    """A bundle that this process loaded."""
    if digest not in _LOADED:
        raise KernelMissing(
            f"the variant came from the bundle {digest[:12]}, which this process did not load",
            hint="scoremod.load(path) of the same file first",
        )
    return _LOADED[digest]


# -- as text -----------------------------------------------------------------------------------

_MARK = "# bundle "


def marked(text: str, digest: str) -> str:
    """The text of a variant of a bundle: a comment says which one."""
    return f"{_MARK}{digest}\n{text}" if digest else text


def digest_in(text: str) -> str:
    """The bundle that a variant's text names; "" for none."""
    first, _, _ = text.partition("\n")
    return first.removeprefix(_MARK) if first.startswith(_MARK) else ""
