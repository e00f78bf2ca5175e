# SPDX-License-Identifier: BSD-3-Clause
"""Defining operators in a namespace that vLLM's extensions would have filled."""

from collections.abc import Callable

import torch

_LIBRARIES: dict[str, torch.library.Library] = {}


def define(namespace: str, schema: str, implementation: Callable, fake: Callable | None = None) -> None:
    """Define namespace::schema for every device, unless an extension has.

    fake defaults to an operator that returns nothing.
    """
    name = schema.split("(")[0]
    if hasattr(getattr(torch.ops, namespace), name):
        return
    library = _LIBRARIES.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
    library.define(schema)
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::{name}", fake or (lambda *_, **__: None), lib=library)
