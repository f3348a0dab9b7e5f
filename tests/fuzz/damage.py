"""Damage to the content of a file, which a seed decides.

Files that pack others are packed anew after the damage, so that it lies behind their
checksums as well as in front of them.
"""

import contextlib
import gzip
import io
import zipfile
from collections.abc import Callable

import numpy as np

Rng = np.random.Generator
PACKINGS = (
    zipfile.ZIP_STORED,
    zipfile.ZIP_DEFLATED,
    zipfile.ZIP_BZIP2,
    zipfile.ZIP_LZMA,
)
NUMBERS = (0, 1, -1, 127, 128, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1)
TEXTS = (
    *(b"\n", b",", b",,,,", b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"nan", b"1e999"),
    *(b"-1", b"99999999999999999999", b"'", b'"', b"(", b")", b"{'a':", b"."),
    *(b"#", b"\n\n\n", b"\r", b"\n# a\n", b"1e400", b"[" * 99, b'{"a":' * 99),
)
TYPES = ("f8", "f4", "f2", "i8", "u8", "i1", "?", "c16", "U3", "S0", "M8[ns]", "V3")


def damaged(content: bytes, rng: Rng) -> bytes:
    """The content of a file after one to four changes."""
    if content[:2] == b"PK" and rng.random() < 0.7:
        return _in_zip(content, rng)
    if content[:2] == b"\x1f\x8b" and rng.random() < 0.7:
        return gzip.compress(_changed(gzip.decompress(content), rng), 1)
    return _changed(content, rng)


def _changed(content: bytes, rng: Rng) -> bytes:
    for _ in range(rng.integers(1, 5)):
        content = CHANGES[rng.integers(len(CHANGES))](content, rng)
    return content


def _flip(content: bytes, rng: Rng) -> bytes:
    changed = bytearray(content or b"\0")
    for place in rng.integers(len(changed), size=rng.integers(1, 4)):
        changed[place] ^= 1 << rng.integers(8)
    return bytes(changed)


def _cut(content: bytes, rng: Rng) -> bytes:
    return content[: rng.integers(len(content) + 1)]


def _drop(content: bytes, rng: Rng) -> bytes:
    first, last = _slice(content, rng)
    return content[:first] + content[last:]


def _repeat(content: bytes, rng: Rng) -> bytes:
    first, last = _slice(content, rng)
    return (
        content[:last] + content[first:last] * int(rng.integers(1, 9)) + content[last:]
    )


def _number(content: bytes, rng: Rng) -> bytes:
    number, size = NUMBERS[rng.integers(len(NUMBERS))], 1 << int(rng.integers(4))
    order = ("little", "big")[rng.integers(2)]
    written = (number % 256**size).to_bytes(size, order)
    place = rng.integers(len(content) + 1)
    return content[:place] + written + content[place + size :]


def _text(content: bytes, rng: Rng) -> bytes:
    text, place = TEXTS[rng.integers(len(TEXTS))], rng.integers(len(content) + 1)
    return content[:place] + text + content[place + len(text) * rng.integers(2) :]


def _digit(content: bytes, rng: Rng) -> bytes:
    """Changes a number that is written as text, as in headers and tables."""
    places = [i for i, byte in enumerate(content[:4096]) if chr(byte).isdigit()]
    if not places:
        return content
    place = places[rng.integers(len(places))]
    return content[:place] + str(rng.integers(10**6)).encode() + content[place + 1 :]


def _slice(content: bytes, rng: Rng) -> tuple[int, int]:
    first = int(rng.integers(len(content) + 1))
    return first, min(len(content), first + int(rng.integers(1, 65)))


CHANGES: tuple[Callable[[bytes, Rng], bytes], ...]
CHANGES = (_flip, _cut, _drop, _repeat, _number, _text, _digit)


def _in_zip(content: bytes, rng: Rng) -> bytes:
    """Another array, other bytes or another name for a member of an archive."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = list(members)[rng.integers(len(members))]
    kind = rng.integers(4)
    if kind == 0:
        members[name] = _changed(members[name], rng)
    elif kind == 1:
        members[name] = _other_array(members[name], rng)
    elif kind == 2:
        members[_text(name.encode(), rng).decode("latin1")] = members.pop(name)
    else:
        members[name] = members[list(members)[rng.integers(len(members))]]
    packed = io.BytesIO()
    packing = PACKINGS[rng.integers(len(PACKINGS))]
    with zipfile.ZipFile(packed, "w", packing) as archive:
        for member, value in members.items():
            archive.writestr(member.replace("\0", ""), value)
    content = packed.getvalue()
    return _flip(content, rng) if rng.random() < 0.2 else content


def _other_array(content: bytes, rng: Rng) -> bytes:
    array = np.load(io.BytesIO(content))
    kind = rng.integers(7)
    if kind == 0:
        with np.errstate(all="ignore"):
            array = np.zeros(array.shape, TYPES[rng.integers(len(TYPES))])
    elif kind == 1:
        array = array[: rng.integers(len(array) + 1)] if array.ndim else array[None]
    elif kind == 2:
        array = array.T[..., None] if rng.random() < 0.5 else array.ravel()
    elif kind == 3:
        array = array[..., :0] if array.ndim else array[None, None]
    elif kind == 4:
        with np.errstate(all="ignore"), contextlib.suppress(TypeError, ValueError):
            array = (array * 2.0**62).astype(TYPES[rng.integers(len(TYPES))])
    elif array.size and array.dtype.kind in "iuf":
        array = array.copy()
        number = NUMBERS[rng.integers(len(NUMBERS))]
        with np.errstate(all="ignore"):
            value = np.array([number], object).astype("f8").astype(array.dtype)
            if array.dtype.kind == "f" and rng.random() < 0.5:
                value = np.array([np.nan, np.inf, -1.0, 1e300])[rng.integers(4)]
            array.flat[rng.integers(array.size)] = np.asarray(value).ravel()[0]
    written = io.BytesIO()
    np.save(written, array)
    return written.getvalue()
