# SPDX-License-Identifier: BSD-3-Clause
"""``.superl8`` files: bytes as the format's description has them, damage found, nothing half written."""

import json
import os
import random
import signal
import struct
import subprocess
import sys
import zlib

import pytest
import torch

from vllm_superl8.checkpoint.superl8_file import Superl8File
from vllm_superl8.checkpoint.superl8_header import ContainerError, read_header
from vllm_superl8.checkpoint.superl8_writer import Superl8Writer

CODES = bytes([1, 2, 3, 253, 129, 127])  # (2, 3) int8: 1 2 3 / -3 -127 127
SCALES = struct.pack("<2f", 0.5, 2.0)
BIAS = struct.pack("<3e", 1.0, -2.0, 0.25)
VARIANTS = ("front", "footer")


def row(dtype, shape, offset, data, scheme="raw", scale=None):
    return {
        "dtype": dtype, "shape": shape, "offset": offset, "nbytes": len(data), "crc32": zlib.crc32(data),
        "scheme": scheme, "scale": scale, "rotated": False, "hadamard_dim": None, "smoothed": False,
        "group_size": None, "codebook": None, "recipe": None,
    }  # fmt: skip


def golden_header() -> dict:
    """By hand from the description of the format, with names as a foreign writer may choose them."""
    return {
        "arch": "sm70",
        "quant": "dp4a_w8a8",
        "version": 1,
        "kernel_abi_version": 1,
        "layout": "cuda-dp4a",
        "align": 128,
        "provenance": {"source": "by hand"},
        "tensors": {
            "model.layers.0.mlp.up_proj.weight": row("int8", [2, 3], 0, CODES, "per_row_i8", "up.scale"),
            "up.scale": row("float32", [2], 128, SCALES),
            "model.layers.0.mlp.up_proj.bias": row("float16", [3], 256, BIAS),
        },
        "shards": {
            "pp_stages": [["model.layers.0.mlp.up_proj.weight", "up.scale"], ["model.layers.0.mlp.up_proj.bias"]],
            "experts": {"0.3": ["model.layers.0.mlp.up_proj.weight"]},
        },
        "__meta__": {"arch": "llama", "weight_bits": 8, "config": {"model_type": "llama"}},
    }


def assembled(header: bytes, variant: str, blobs: bytes | None = None) -> bytes:
    if blobs is None:
        blobs = CODES.ljust(128, b"\0") + SCALES.ljust(128, b"\0") + BIAS
    if variant == "front":
        head = b"FNI8QCK1" + len(header).to_bytes(8, "little") + header
        return head + bytes(-len(head) % 128) + blobs
    body = (b"FNI8QCK1" + bytes(8)).ljust(128, b"\0") + blobs
    return body + header + len(body).to_bytes(8, "little") + len(header).to_bytes(8, "little") + b"FNI8FOOT"


def put(path, header, variant, **changes):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(assembled(header, variant, **changes))
    return path


@pytest.mark.parametrize("variant", VARIANTS)
def test_reader_takes_the_bytes_of_the_description(tmp_path, variant):
    file = Superl8File(put(tmp_path / "m.superl8", golden_header(), variant))
    weight, header = "model.layers.0.mlp.up_proj.weight", file.header
    assert header.variant == variant
    assert file.tensor(weight).tolist() == [[1, 2, 3], [-3, -127, 127]]
    assert file.tensor(weight).dtype == torch.int8
    assert file.scales(weight).tolist() == [[0.5], [2.0]]
    assert file.tensor("model.layers.0.mlp.up_proj.bias").tolist() == [1.0, -2.0, 0.25]
    assert header.tensors[weight].scheme == "per_row_i8" and header.scales == {"up.scale"}
    assert header.meta == {"arch": "llama", "weight_bits": 8, "config": {"model_type": "llama"}}
    assert header.pp_stages == ((weight, "up.scale"), ("model.layers.0.mlp.up_proj.bias",))
    assert header.experts == {"0.3": (weight,)}
    assert header.provenance == {"source": "by hand"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_writer_gives_the_bytes_of_the_description(tmp_path, variant):
    path, golden = tmp_path / "m.superl8", golden_header()
    with Superl8Writer(path, variant) as writer:
        codes = torch.frombuffer(bytearray(CODES), dtype=torch.int8).view(2, 3)
        writer.add("model.layers.0.mlp.up_proj.weight", codes, "per_row_i8", scale="up.scale")
        writer.add("up.scale", torch.tensor([0.5, 2.0]))
        writer.add("model.layers.0.mlp.up_proj.bias", torch.tensor([1.0, -2.0, 0.25], dtype=torch.float16))
        writer.meta, writer.provenance = golden["__meta__"], golden["provenance"]
        writer.pp_stages, writer.experts = golden["shards"]["pp_stages"], golden["shards"]["experts"]
    written = path.read_bytes()
    if variant == "front":
        text = written[16 : 16 + int.from_bytes(written[8:16], "little")]
    else:
        at, length = struct.unpack("<QQ", written[-24:-8])
        text = written[at : at + length]
    assert json.loads(text) == golden
    assert written == assembled(text, variant)
    assert os.listdir(tmp_path) == ["m.superl8"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_come_back_as_they_were(tmp_path, variant, dtype):
    given = {
        "a": torch.randint(0, 100, (7, 5)).to(dtype),
        "scalar": torch.tensor(3).to(dtype),
        "empty": torch.empty(0, 4).to(dtype),
        "strided": torch.randint(0, 100, (300, 4)).to(dtype).T[:, ::2],
    }
    with Superl8Writer(tmp_path / "m", variant) as writer:
        for name, value in given.items():
            writer.add(name, value)
        writer.add_file("tokenizer.json", b"{}")
        writer.add_file("empty.txt", b"")
    file = Superl8File(tmp_path / "m")
    for name, value in given.items():
        assert torch.equal(file.tensor(name), value) and file.tensor(name).dtype == dtype
    assert (file.file("tokenizer.json"), file.file("empty.txt")) == (b"{}", b"")


def test_files_are_no_tensors_of_the_model(tmp_path):
    with Superl8Writer(tmp_path / "m") as writer:
        writer.add("a", torch.ones(2))
        writer.add_file("tokenizer.json", b"{}")
        writer.meta = {"weight_bits": 8}
    header = read_header(tmp_path / "m")
    assert list(header.tensors) == ["a"] and list(header.files) == ["tokenizer.json"]
    assert header.meta == {"weight_bits": 8}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_flipped_bit_of_any_tensor_is_found(tmp_path, variant):
    path = put(tmp_path / "m.superl8", golden_header(), variant)
    whole = path.read_bytes()
    for name, blob in read_header(path).tensors.items():
        for at in (blob.offset, blob.offset + blob.nbytes - 1):
            damaged = bytearray(whole)
            damaged[at] ^= 4
            path.write_bytes(damaged)
            with pytest.raises(ContainerError, match=f"tensor {name} has CRC"):
                Superl8File(path).tensor(name)
            Superl8File(path, verify=False).tensor(name)


def change(key, value, tensor="model.layers.0.mlp.up_proj.weight"):
    def changed(header):
        (header["tensors"][tensor] if tensor else header)[key] = value

    return changed


REFUSED = {
    "version": (change("version", 2, None), "its version is 2, 1 is read"),
    "true for 1": (change("version", True, None), "its version is True"),
    "layout": (change("layout", "rocm", None), "its layout is rocm"),
    "align": (change("align", 64, None), "its align is 64"),
    "no tensors": (lambda header: header.pop("tensors"), "tensors is None, wanted an object"),
    "meta": (change("__meta__", [], None), r"__meta__ is \[\]"),
    "dtype": (change("dtype", "int7"), "has dtype int7"),
    "shape": (change("shape", [2, -3]), r"has shape \[2, -3\]"),
    "overflow": (change("shape", [1 << 62, 1 << 62]), "and dtype int8 has 6 bytes"),
    "nbytes": (change("nbytes", 7), "and dtype int8 has 7 bytes"),
    "offset": (change("offset", 64), "is at offset 64"),
    "negative": (change("offset", -128), "is at offset -128"),
    "end": (change("offset", 384), r"would end at byte \d+, blobs end at byte \d+"),
    "overlap": (change("offset", 128), "up_proj.weight and up.scale overlap|up.scale and .*up_proj.weight overlap"),
    "scheme": (change("scheme", "per_row_i2"), "has scheme per_row_i2; this version reads per_row_i8"),
    "no scale": (change("scale", None), "has its scales in None"),
    "other scale": (change("scale", "up"), "has its scales in up, which is no tensor"),
    "scale dtype": (change("scale", "model.layers.0.mlp.up_proj.bias"), "holds scales and is raw of torch.float16"),
    "int4": (change("scheme", "per_group_i4"), "wanted a matrix of uint8"),
    "kquant": (change("scheme", "gguf_kquant"), "wanted a matrix of uint8"),
    "group": (change("scheme", "per_group_i8"), "has group_size None"),
    "crc": (change("crc32", 1 << 32), "has crc32 4294967296"),
    "stage": (change("shards", {"pp_stages": [["nobody"]]}, None), r"pp_stages\[0\] names nobody"),
    "expert": (change("shards", {"experts": {"0.0": "x"}}, None), "wanted a list of tensor names"),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", REFUSED)
def test_reader_refuses_a_contradictory_header(tmp_path, variant, case):
    header = golden_header()
    REFUSED[case][0](header)
    with pytest.raises(ContainerError, match=REFUSED[case][1]) as caught:
        read_header(put(tmp_path / "m.superl8", header, variant))
    assert "m.superl8" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "it begins with b''"),
        (b"GGUF" * 40, "no .superl8 file"),
        (b"FNI8QCK1\1", "within its first 16 bytes"),
        (b"FNI8QCK1" + bytes(8), "too few for a footer"),
        (b"FNI8QCK1" + bytes(400), "it ends with"),
        (b"FNI8QCK1" + struct.pack("<Q", 1 << 60), "header would end at byte"),
        (b"FNI8QCK1" + struct.pack("<Q", 2) + b"[]", "the header is"),
        (b"FNI8QCK1" + struct.pack("<Q", 4) + b'{"a"', "is not JSON"),
        (b"FNI8QCK1" + struct.pack("<Q", 15) + b'{"a": 1,"a": 2}', "key a is in its header twice"),
        (b"FNI8QCK1" + struct.pack("<Q", 100000) + b"[" * 100000, "is not JSON"),
        (assembled(b"{}", "footer")[:-9] + b"\xff" + b"FNI8FOOT", "its header would be bytes"),
    ],
)
def test_reader_refuses_what_is_no_file(tmp_path, content, match):
    (tmp_path / "m.superl8").write_bytes(content)
    with pytest.raises(ContainerError, match=match):
        read_header(tmp_path / "m.superl8")


def test_reader_bounds_the_header(tmp_path):
    path = tmp_path / "m.superl8"
    with path.open("wb") as file:
        file.write(b"FNI8QCK1" + struct.pack("<Q", 1 << 30))
        file.truncate((1 << 30) + 128)  # sparse
    with pytest.raises(ContainerError, match=r"1073741824 bytes, at most \d+ are read"):
        read_header(path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_mutated_headers_never_crash(tmp_path, variant):
    """Each of 300 mutations is read as a whole file or refused by the format's own error."""
    path, chance = tmp_path / "m.superl8", random.Random(variant)
    whole = assembled(json.dumps(golden_header()).encode(), variant)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            kind = chance.randrange(4)
            if kind == 0:
                data[at] ^= 1 << chance.randrange(8)
            elif kind == 1:
                data[at] = chance.choice(b'0123456789"{}[],:-eE.\0\xff')
            elif kind == 2:
                del data[at : at + chance.randint(1, 40)]
            else:
                data[at:at] = bytes(chance.choice(b'0123456789{}["]') for _ in range(chance.randint(1, 8)))
        path.write_bytes(data)
        try:
            file = Superl8File(path)
            for name in file.header.tensors:
                file.tensor(name)
        except ContainerError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 1000
    assert refused > 150


def test_writer_leaves_nothing_after_an_error(tmp_path):
    (tmp_path / "m").write_bytes(b"old")
    with pytest.raises(RuntimeError, match="stop"), Superl8Writer(tmp_path / "m") as writer:
        writer.add("a", torch.ones(2))
        raise RuntimeError("stop")
    assert os.listdir(tmp_path) == ["m"] and (tmp_path / "m").read_bytes() == b"old"


def test_writer_refuses_a_file_that_its_own_reader_would(tmp_path):
    with pytest.raises(ContainerError, match="has its scales in nothing"), Superl8Writer(tmp_path / "m") as writer:
        writer.add("a", torch.ones(2, 2, dtype=torch.int8), "per_row_i8", scale="nothing")
    assert not (tmp_path / "m").exists()


def test_two_writers_of_one_file_are_refused(tmp_path):
    with Superl8Writer(tmp_path / "m") as writer:
        writer.add("a", torch.ones(2))
        with pytest.raises(ContainerError, match="another process writes it"), Superl8Writer(tmp_path / "m"):
            pass
    assert torch.equal(Superl8File(tmp_path / "m").tensor("a"), torch.ones(2))


def interrupted(path, key, count):
    """A writer that stops after `count` of the tensors t0, t1, ..."""
    with pytest.raises(RuntimeError), Superl8Writer(path, resume_key=key) as writer:
        for index in range(count):
            writer.add(f"t{index}", torch.full((100,), float(index)))
        raise RuntimeError
    assert not path.exists()


def finished(path, key, count=4):
    """(what was written anew, the file)."""
    anew = []
    with Superl8Writer(path, resume_key=key) as writer:
        for index in range(count):
            if f"t{index}" not in writer:
                anew.append(index)
                writer.add(f"t{index}", torch.full((100,), float(index)))
    file = Superl8File(path)
    for index in range(count):
        assert torch.equal(file.tensor(f"t{index}"), torch.full((100,), float(index)))
    assert os.listdir(path.parent) == [path.name]
    return anew


def test_an_interrupted_file_goes_on(tmp_path):
    interrupted(tmp_path / "m", "key", 2)
    assert finished(tmp_path / "m", "key") == [2, 3]


def test_other_options_begin_anew(tmp_path):
    interrupted(tmp_path / "m", "key", 2)
    assert finished(tmp_path / "m", "other") == [0, 1, 2, 3]


def test_damaged_leftovers_are_written_again(tmp_path):
    interrupted(tmp_path / "m", "key", 3)
    partial = tmp_path / "m.partial"
    data = bytearray(partial.read_bytes())
    data[128 + 512 + 3] ^= 1  # in t1; t0 has 400 bytes from 128 on
    partial.write_bytes(data)
    assert finished(tmp_path / "m", "key") == [1, 2, 3]


def test_a_torn_journal_is_no_obstacle(tmp_path):
    interrupted(tmp_path / "m", "key", 3)
    journal = tmp_path / "m.partial.journal"
    journal.write_text(journal.read_text()[:-20])
    assert finished(tmp_path / "m", "key") == [2, 3]


WRITE_SLOWLY = """
import sys, time, torch
from vllm_superl8.checkpoint.superl8_writer import Superl8Writer
with Superl8Writer(sys.argv[1], resume_key="key") as writer:
    for index in range(1000):
        writer.add(f"t{index}", torch.full((100,), float(index)))
        print(index, flush=True)
        time.sleep(0.02)
"""


def test_a_killed_writer_leaves_no_file_and_can_go_on(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITE_SLOWLY, tmp_path / "m"], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if int(line) == 2:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "m").exists()
    assert min(finished(tmp_path / "m", "key", 50)) >= 3
