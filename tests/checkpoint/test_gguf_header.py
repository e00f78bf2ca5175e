# SPDX-License-Identifier: BSD-3-Clause
"""The header reader agrees with gguf.GGUFReader on sound files, and refuses all others in one line."""

import random
import struct
import time

import gguf
import numpy as np
import pytest
import tiny_gguf
from gguf.constants import GGMLQuantizationType as Type

from vllm_superl8.checkpoint.gguf_header import read_file, read_model, shards

SPLIT = {1: ("a.weight", "b.weight"), 2: ("c.weight",)}


def small(path, tensors=("a.weight", "b.weight", "c.weight"), extra=None):
    """A file of three small tensors, two quantised, and one metadata value of every kind."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("k.u8", 250)
    writer.add_int16("k.i16", -7)
    writer.add_float64("k.f64", 0.1)
    writer.add_bool("k.bool", True)
    writer.add_string("k.text", "naïve\nline")
    writer.add_array("k.numbers", [1, -2, 3])
    writer.add_array("k.floats", [0.5, 2.0])
    writer.add_array("k.strings", ["one", "", "drei"])
    if extra is not None:
        extra(writer)
    values = np.arange(2 * 64, dtype=np.float32).reshape(2, 64)
    for name in tensors:
        if name == "a.weight":
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, Type.Q8_0), raw_dtype=Type.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def path(tmp_path):
    return small(tmp_path / "small.gguf")


def header_bytes(path) -> int:
    return min(tensor.offset for tensor in read_file(path).tensors.values())


def changed(path, old: bytes, new: bytes, skip=0):
    data = path.read_bytes()
    at = data.index(old) + len(old) + skip
    path.write_bytes(data[:at] + new + data[at + len(new) :])
    return path


def refused(path, match):
    with pytest.raises(ValueError, match=match) as caught:
        read_model(path)
    message = str(caught.value)
    assert path.name in message and "\n" not in message


@pytest.mark.parametrize("name", ["small", "qwen2"])
def test_header_matches_gguf_reader(tmp_path, name):
    path = tmp_path / f"{name}.gguf"
    if name == "small":
        small(path)
    else:
        tiny_gguf.write(path, tiny_gguf.model(name), name, Type.Q4_1)
    reader, header = gguf.GGUFReader(path), read_file(path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == theirs
    assert len(header.tensors) == len(reader.tensors)
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert (ours.shape, ours.type) == (tuple(reversed(tensor.shape.tolist())), tensor.tensor_type)
        assert (ours.offset, ours.nbytes) == (tensor.data_offset, tensor.n_bytes)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.9])
def test_header_refuses_a_file_cut_short(path, share):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    refused(path, "cut short" if share else "not a GGUF file")


def test_header_refuses_a_wrong_magic(path):
    path.write_bytes(b"NOPE" + path.read_bytes()[4:])
    refused(path, "begins with b'NOPE'")


@pytest.mark.parametrize("version,match", [(1, "version 1"), (9, "version 9"), (3 << 24, "big-endian")])
def test_header_refuses_other_versions(path, version, match):
    refused(changed(path, b"GGUF", struct.pack("<I", version)), match)


@pytest.mark.parametrize("skip,what", [(4, "tensors"), (12, "metadata entries")])
def test_header_refuses_impossible_counts(path, skip, what):
    refused(changed(path, b"GGUF", struct.pack("<Q", 1 << 60), skip), f"{1 << 60} {what} cannot fit")


@pytest.mark.parametrize("key", ["k.text", "k.strings", "k.numbers"])
def test_header_refuses_impossible_lengths(path, key):
    skip = 4 if key == "k.text" else 8
    refused(changed(path, key.encode(), struct.pack("<Q", 1 << 62), skip), rf"metadata {key}.*(damaged|fit)")


def test_header_refuses_unknown_value_types(path):
    refused(changed(path, b"k.f64", struct.pack("<I", 13)), "metadata k.f64 has type 13")


def test_header_refuses_nested_arrays(path):
    refused(changed(path, b"k.numbers", struct.pack("<I", 9), 4), "k.numbers is an array of type 9")


def test_header_refuses_text_that_is_not_utf8(path):
    refused(changed(path, b"k.text", b"\xff\xfe", 12), "k.text at byte .* is not UTF-8")


@pytest.mark.parametrize("twice", [b"k.i16", b"b.weight"])
def test_header_refuses_doubles(path, twice):
    other = {b"k.i16": b"k.f64", b"b.weight": b"c.weight"}[twice]
    path.write_bytes(path.read_bytes().replace(other, twice))
    refused(path, f"{twice.decode()} is there twice")


@pytest.mark.parametrize(
    "skip,new,match",
    [
        (0, struct.pack("<I", 9), "b.weight has 9 dimensions"),
        (4, struct.pack("<Q", 0), "no dimension may be 0"),
        (4, struct.pack("<Q", 33), "whole blocks of 32"),
        (4, struct.pack("<Q", 1 << 60), "b.weight of shape .* would end at byte"),
        (12, struct.pack("<Q", (1 << 64) - 1), "b.weight of shape .* would end at byte"),
        (20, struct.pack("<I", 4711), "b.weight has GGUF type 4711, which the installed gguf package does not know"),
        (24, struct.pack("<Q", 1 << 40), "b.weight .* would end at byte"),
        (24, struct.pack("<Q", 7), "offset 7, not a multiple of 32"),
        (24, struct.pack("<Q", 0), "tensors .* overlap"),
    ],
    ids=["dims", "zero", "partial-block", "huge", "huge-rows", "type", "beyond-the-end", "misaligned", "overlap"],
)
def test_header_refuses_impossible_tensors(path, skip, new, match):
    refused(changed(path, b"b.weight", new, skip), match)


def test_header_refuses_a_bad_alignment(tmp_path):
    path = small(tmp_path / "a.gguf", extra=lambda writer: writer.add_uint32("general.alignment", 32))
    refused(changed(path, b"general.alignment", struct.pack("<I", 0), 4), "general.alignment is 0")


def test_header_survives_mutations_with_nothing_but_value_errors(path):
    """600 damaged headers: each is read or refused, quickly, in one line that names the file."""
    data, end = path.read_bytes(), header_bytes(path)
    rng = random.Random(5)
    outcomes = {"read": 0, "refused": 0}
    start = time.monotonic()
    for _ in range(600):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(end)
            kind = rng.randrange(4)
            if kind == 0:
                damaged[at] = rng.randrange(256)
            elif kind == 1:
                damaged[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 1 << 31, 1 << 63, (1 << 64) - 1)))
            elif kind == 2:
                del damaged[at : at + rng.randrange(1, 9)]
            else:
                damaged[at:at] = rng.randbytes(rng.randrange(1, 9))
        path.write_bytes(damaged)
        try:
            read_model(path)
            outcomes["read"] += 1
        except ValueError as error:
            assert path.name in str(error) and "\n" not in str(error), str(error)
            outcomes["refused"] += 1
    assert outcomes["refused"] > 300 and outcomes["read"] > 5, outcomes
    assert time.monotonic() - start < 30


def split(folder, stated=2):
    """The small model in two files."""
    for part, names in SPLIT.items():
        small(
            folder / f"m-{part:05d}-of-00002.gguf",
            names,
            lambda writer, part=part: (
                writer.add_uint16("split.no", part - 1),
                writer.add_uint16("split.count", stated),
            ),
        )
    return folder / "m-00001-of-00002.gguf"


@pytest.mark.parametrize("named", [1, 2])
def test_split_model_is_read_whole_whichever_part_is_named(tmp_path, named):
    first = split(tmp_path)
    header = read_model(tmp_path / f"m-{named:05d}-of-00002.gguf")
    assert list(header.tensors) == [name for names in SPLIT.values() for name in names]
    assert header.path == first
    assert header.tensors["c.weight"].path.name == "m-00002-of-00002.gguf"


def test_split_model_refuses_a_missing_part(tmp_path):
    first = split(tmp_path)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    refused(first, "m-00002-of-00002.gguf of the same model is missing")


def test_split_model_refuses_a_part_under_another_name(tmp_path):
    refused(split(tmp_path).rename(tmp_path / "model.gguf"), "one of 2 files of a split model")


def test_split_model_refuses_the_same_tensor_in_two_parts(tmp_path):
    first = split(tmp_path)
    small(tmp_path / "m-00002-of-00002.gguf", ("a.weight",))
    with pytest.raises(ValueError, match=r"a\.weight is in m-00001-of-00002\.gguf already"):
        read_model(first)


def test_shards_of_a_single_file_is_that_file(path):
    assert shards(path) == [path]


def test_digest_follows_the_header_and_not_the_place(path, tmp_path):
    digest = read_model(path).digest
    moved = path.rename(tmp_path / "other.gguf")
    assert read_model(moved).digest == digest
    assert read_model(changed(moved, b"k.u8", b"\x07", 4)).digest != digest
