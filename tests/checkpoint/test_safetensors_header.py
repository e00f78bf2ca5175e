# SPDX-License-Identifier: BSD-3-Clause
"""Headers of safetensors files: what they hold, and what is wrong with damaged and incomplete ones."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from vllm_superl8.checkpoint.safetensors_header import INDEX, read_file, read_folder


def write(folder, name="model.safetensors", **tensors):
    save_file(tensors, folder / name)
    return folder / name


def test_tensors_have_their_dtypes_and_shapes(tmp_path):
    path = write(tmp_path, a=torch.zeros(2, 3), b=torch.zeros(4, dtype=torch.float8_e4m3fn), c=torch.zeros(()))
    found = read_file(path)
    assert {name: (of.dtype, of.shape) for name, of in found.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F8_E4M3", (4,)),
        "c": ("F32", ()),
    }
    assert found == read_folder(tmp_path)


def test_mistrals_second_copy_is_left_out(tmp_path):
    write(tmp_path, a=torch.zeros(2))
    write(tmp_path, "consolidated.safetensors", wq=torch.zeros(2))
    assert list(read_folder(tmp_path)) == ["a"]


def test_a_file_cut_short_names_the_tensor(tmp_path):
    path = write(tmp_path, a=torch.zeros(100), b=torch.zeros(100))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor [ab] ends 10 bytes after the end of the file"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no safetensors file, or cut short"),
        (struct.pack("<Q", 1 << 60) + b"{}", "no safetensors file, or cut short"),
        (struct.pack("<Q", 4) + b"{{{{", "its header is no JSON"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "entry of tensor a is damaged"),
        (struct.pack("<Q", 57) + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}', "tensor a is damaged"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content.ljust(65))
    if not content:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_file(path)


def test_a_missing_shard_and_a_missing_tensor_are_named(tmp_path):
    write(tmp_path, "model-00001-of-00002.safetensors", a=torch.zeros(2))
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors: the file is missing, it holds tensor b"):
        read_folder(tmp_path)
    write(tmp_path, "model-00002-of-00002.safetensors", c=torch.zeros(2))
    with pytest.raises(ValueError, match=r"00002\.safetensors: tensor b is missing, which .* says is there"):
        read_folder(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no \.safetensors file"):
        read_folder(tmp_path)
