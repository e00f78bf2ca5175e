# SPDX-License-Identifier: BSD-3-Clause
"""Defining operators in a namespace that vLLM's extensions would have filled."""

from collections.abc import Callable

import torch

_LIBRARIES: dict[str, torch.library.Library] = {}


def _returns_nothing(*_, **__) -> None:
    return None


def define(namespace: str, schema: str, implementation: Callable, fake: Callable | None = _returns_nothing) -> None:
    """Define namespace::schema for every device, unless an extension has.

    fake gives the outputs' shapes; None leaves it to vLLM, which registers its own for some operators that it finds.
    """
    name = schema.split("(")[0]
    if hasattr(getattr(torch.ops, namespace), name):
        return
    library = _LIBRARIES.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
    library.define(schema)
    library.impl(name, implementation, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
