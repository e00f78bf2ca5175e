# SPDX-License-Identifier: BSD-3-Clause
"""Everything is in pyproject.toml and csrc/build.py."""

import importlib.util
import sys
from pathlib import Path

from setuptools import setup

spec = importlib.util.spec_from_file_location("superl8_build", Path(__file__).resolve().parent / "csrc" / "build.py")
build = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)

setup(**build.setup_arguments())
