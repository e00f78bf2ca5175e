# SPDX-License-Identifier: BSD-3-Clause
"""Reads sections and symbols of 64-bit little-endian ELF files: host libraries and CUDA's cubins alike."""

import struct
from dataclasses import dataclass
from pathlib import Path

SYMTAB, DYNAMIC, NOBITS = 2, 6, 8
NEEDED = 1
OBJECT, FUNCTION = 1, 2
WRITABLE = 1


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    flags: int
    data: bytes
    link: int


@dataclass(frozen=True)
class Symbol:
    """A defined symbol: value is its offset in the file's address space, size in bytes."""

    name: str
    kind: int
    section: Section
    value: int
    size: int


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def sections(path: Path) -> list[Section]:
    """Every section of an ELF file. Raises ValueError if it is none of the kind that is read here."""
    data = Path(path).read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path}: not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_bytes, count, names_at = struct.unpack_from("<HHH", data, 58)
    rows = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_bytes) for i in range(count)]
    names = data[rows[names_at][4] :]
    return [
        Section(_text(names, name), kind, flags, b"" if kind == NOBITS else data[offset : offset + size], link)
        for name, kind, flags, _, offset, size, link, *_ in rows
    ]


def needed(path: Path) -> list[str]:
    """Names of the shared libraries that a library is linked with."""
    table = sections(path)
    found = []
    for section in table:
        if section.kind == DYNAMIC:
            names = table[section.link].data
            found += [_text(names, value) for tag, value in struct.iter_unpack("<QQ", section.data) if tag == NEEDED]
    return found


def symbols(path: Path) -> list[Symbol]:
    """Every defined symbol of an ELF file."""
    table = sections(path)
    found = []
    for section in table:
        if section.kind != SYMTAB:
            continue
        names = table[section.link].data
        for at in range(0, len(section.data), 24):
            name, info, _, index, value, size = struct.unpack_from("<IBBHQQ", section.data, at)
            if 0 < index < len(table):
                found.append(Symbol(_text(names, name), info & 15, table[index], value, size))
    return found
