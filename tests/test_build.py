# SPDX-License-Identifier: BSD-3-Clause
"""csrc/build.py: what it builds, what it refuses, what it keeps."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from vllm_superl8.ops import registry

import elf
import emulator

BUILD = emulator.builder()
TOOLS = BUILD.toolchain
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
KERNEL = (
    '#include "common/device.cuh"\n#include "extra.cuh"\n'
    "struct Params {{ float* out; }};\n"
    "KERNEL(probe, Params, {bounds}) {{\n{body}\n}}\n"
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty build cache."""
    monkeypatch.setenv("SUPERL8_BUILD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def image_of(folder, body, bounds="32", extra=""):
    """An image with one kernel `probe`."""
    (folder / "probe.cu").write_text(KERNEL.format(body=body, bounds=bounds))
    (folder / "extra.cuh").write_text(extra)
    return BUILD.Image(folder / "probe.cu", None)


def build_py(*, cwd=None, **environment):
    """Run csrc/build.py as a program."""
    return subprocess.run(
        [sys.executable, str(BUILD.CSRC / "build.py")], env={**os.environ, **environment}, cwd=cwd,
        capture_output=True, text=True,
    )  # fmt: skip


# ---- what is built


def test_every_cu_file_is_built_once_for_each_of_its_formats(monkeypatch):
    assert {image.source for image in BUILD.images()} == set(BUILD.kernel_sources())
    table = BUILD.layout()
    row = next(iter(table.LAYOUTS.values()))
    rows = {name: type(row)(**{**vars(row), "name": name, "ops": ("gather", "norm")}) for name in ("q4_a", "q4_b")}
    monkeypatch.setattr(table, "LAYOUTS", rows)
    monkeypatch.setattr(BUILD, "layout", lambda: table)
    found = {image.name: image.defines for image in BUILD.images()}
    assert found["norm_q4_a"] == ["-DDEVICE_HALF", "-DFORMAT=q4_a"]
    assert {"norm_q4_b", "gather_q4_a", "gather_q4_b", "rotary"} <= set(found)
    assert not {"norm", "gather"} & set(found)


def test_architectures_are_checked(monkeypatch):
    monkeypatch.setenv("SUPERL8_ARCHS", "sm_61 sm_70 sm_61")
    assert BUILD.archs() == ["sm_61", "sm_70"]
    monkeypatch.setenv("SUPERL8_ARCHS", "volta")
    with pytest.raises(TOOLS.BuildError, match="'volta' is no architecture; wanted names like sm_70"):
        BUILD.archs()


@pytest.mark.parametrize("arch", ["sm_61", "sm_75"])
def test_kernels_compile_for_other_cards(arch):
    """The smaller files; test_sm_61_has_every_kernel takes all kinds."""
    for name in ("norm", "quantize", "kv_write"):
        image = next(image for image in BUILD.images() if image.source.stem == name)
        entry = BUILD.compile_image(image, [arch])
        made = json.loads((entry / "kernels.json").read_text())
        assert set(made["resources"][arch]) == set(made["symbols"]) != set()


def one_of_a_kind(images):
    """Of images for formats of blocks, which are the same templates, one a family of formats."""
    layouts = BUILD.layout().LAYOUTS
    kinds = {}
    for image in images:
        blocks = image.format in layouts and bool(layouts[image.format].planes)
        kinds.setdefault((image.source, layouts[image.format].codec if blocks else image.format), image)
    return list(kinds.values())


@pytest.mark.slow
@pytest.mark.parametrize("image", one_of_a_kind(BUILD.images()), ids=lambda image: image.name)
def test_sm_61_has_every_kernel(image):
    made = json.loads((BUILD.compile_image(image, ["sm_61"]) / "kernels.json").read_text())
    assert set(made["resources"]["sm_61"]) == set(made["symbols"]) != set()


# ---- what is refused


def test_a_compile_error_names_the_line(cache, tmp_path):
    with pytest.raises(TOOLS.BuildError, match=r"(?s)image probe does not.*probe\.cu\(5\): error.*undefined_name"):
        BUILD.compile_image(image_of(tmp_path, "p.out[0] = undefined_name;"), ["sm_70"])
    assert not list(cache.glob("image-*"))


def test_a_spill_stops_the_build(cache, tmp_path):
    body = (
        "float kept[96];\n"
        "#pragma unroll\nfor (int i = 0; i < 96; i++) kept[i] = p.out[i * 7 + threadIdx.x];\n__syncthreads();\n"
        "#pragma unroll\nfor (int i = 0; i < 96; i++) p.out[i] = kept[i] * kept[95 - i];\n"
    )
    with pytest.raises(TOOLS.BuildError, match=r"probe spills \d+ bytes of registers on sm_70 \(32 in use\)"):
        BUILD.compile_image(image_of(tmp_path, body, bounds="1024, 2"), ["sm_70"])
    assert BUILD.compile_image(image_of(tmp_path, body, bounds="128"), ["sm_70"]).exists()


def test_a_missing_compiler_is_told_with_its_package():
    done = build_py(CXX="no-such-g++")
    assert done.returncode == 1
    assert "'no-such-g++' is not on PATH. Install it (Debian, Ubuntu: apt-get install g++)" in done.stderr
    assert "SUPERL8_PURE_PYTHON=1" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_nvrtc_is_told_with_the_command(monkeypatch):
    def none(dist):
        raise importlib.metadata.PackageNotFoundError(dist)

    monkeypatch.setattr(importlib.metadata, "distribution", none)
    with pytest.raises(TOOLS.BuildError, match=r"nvidia-cuda-nvrtc-cu12 is not installed.*pip install .*12\.9\.86"):
        TOOLS.wheel_file(*BUILD.NVRTC)


# ---- what is kept


def test_what_did_not_change_is_not_compiled_again(cache, tmp_path, monkeypatch):
    first = BUILD.compile_image(image_of(tmp_path, "p.out[0] = 1.f;"), ["sm_70"])
    run = TOOLS.run
    monkeypatch.setattr(TOOLS, "run", lambda *_: pytest.fail("compiled again"))
    assert BUILD.compile_image(image_of(tmp_path, "p.out[0] = 1.f;"), ["sm_70"]) == first
    monkeypatch.setattr(TOOLS, "run", run)
    others = [
        BUILD.compile_image(image_of(tmp_path, "p.out[0] = 2.f;"), ["sm_70"]),
        BUILD.compile_image(image_of(tmp_path, "p.out[0] = 1.f;", extra="// a header changed"), ["sm_70"]),
        BUILD.compile_image(image_of(tmp_path, "p.out[0] = 1.f;"), ["sm_75"]),
    ]
    assert len({first, *others}) == 4


def test_host_objects_follow_the_preprocessed_text(cache, tmp_path):
    source = tmp_path / "one.cpp"
    source.write_text("int f() { return 1; }\n")
    first = TOOLS.compile_object(source, ["-O1"])
    source.write_text("// a comment\nint f() { return 1; }\n")
    assert TOOLS.compile_object(source, ["-O1"]) == first
    assert TOOLS.compile_object(source, ["-O2"]) != first
    source.write_text("int f() { return 2; }\n")
    assert TOOLS.compile_object(source, ["-O1"]) != first


# ---- the extension


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    """The extension of this checkout, built elsewhere."""
    path = tmp_path_factory.mktemp("extension") / f"_C{SUFFIX}"
    BUILD.build_extension(path)
    return path


def test_extension_links_neither_driver_nor_torch(extension):
    names = elf.needed(extension)
    assert any(name.startswith("libstdc++") for name in names)
    assert not [name for name in names if "cuda" in name or "torch" in name or "nvrtc" in name]


def test_extension_imports_without_a_driver_and_says_so_on_launch(extension):
    script = (
        "import importlib.util, json, sys\n"
        f"spec = importlib.util.spec_from_file_location('_C', {str(extension)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(json.dumps(module.build_info()))\n"
        "try:\n    module.rms_norm('fp16', 0, 0, 0, 0, False, 1, 16, 16, 1e-6, 0.0, 0)\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr
    info, error = done.stdout.splitlines()
    info = json.loads(info)
    assert info["source_hash"] == BUILD.source_hash()
    assert (info["nvrtc"], info["version"]) == ("12.9.86", BUILD.version())
    assert set(info["images"]) == {image.name for image in BUILD.images()}
    assert info["kernels"]["rms_norm_fp16"]["image"] == "norm"
    assert 0 < info["kernels"]["rms_norm_fp16"]["registers"] <= 255
    assert error.startswith("rms_norm_fp16: loading its image: ")
    assert "There is no NVIDIA GPU with a driver for CUDA 12 here" in error


def test_extension_is_reproducible(extension, tmp_path):
    again = tmp_path / f"_C{SUFFIX}"
    BUILD.build_extension(again)
    assert again.read_bytes() == extension.read_bytes()


def test_an_older_extension_is_not_used():
    assert registry._stale(BUILD.source_hash()) == ""
    reason = registry._stale("0123456789abcdef")
    assert "_C is stale: made from sources 0123456789abcdef" in reason
    assert reason.endswith("run python csrc/build.py")


# ---- packages


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Folder of the unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    checkout = folder / "checkout"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=BUILD.ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        if name.startswith("tests/") or not (BUILD.ROOT / name).exists():
            continue
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(BUILD.ROOT / name, checkout / name)
    script = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    done = subprocess.run([sys.executable, "-c", script], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = (checkout / "dist").glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    return folder / archive.name.removesuffix(".tar.gz")


def wheel_of(source, folder, **environment):
    """Build a wheel from `source` with what is installed; its path."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    done = subprocess.run(command, cwd=source, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def names_in(wheel):
    done = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", str(wheel)], capture_output=True, text=True, check=True
    )
    return [line.split()[0] for line in done.stdout.splitlines()[1:]]


def test_a_wheel_builds_from_the_source_distribution(sdist, tmp_path):
    names = names_in(wheel_of(sdist, tmp_path))
    assert f"vllm_superl8/_C{SUFFIX}" in names
    assert "vllm_superl8/formats/layout.py" in names
    assert not [name for name in names if name.startswith(("csrc/", "tests/"))]


def test_a_pure_wheel_has_no_extension(sdist, tmp_path):
    wheel = wheel_of(sdist, tmp_path, SUPERL8_PURE_PYTHON="1", CXX="no-such-g++")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in names_in(wheel) if "_C" in name]
