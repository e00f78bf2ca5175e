# SPDX-License-Identifier: BSD-3-Clause
"""Questions to the metadata of a GGUF file, answered with the right type or refused by name."""

import math
import re
from typing import Any, NoReturn

from vllm_superl8.checkpoint.gguf_header import Header, Tensor

LIMIT = 1 << 31
"""No dimension, count or length of a model reaches this."""

BLOCK = re.compile(r"blk\.(\d+)\.")

CONTROL = 3
"""tokenizer.ggml.token_type of tokens such as <|im_end|>."""

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<turn|>")
"""Control tokens that end a turn; they end generation where the file's chat template writes them."""

TOKEN_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
"""Fields of config.json to keys under tokenizer.ggml."""


class Metadata:
    """Fields of the model that a header describes; keys are given without the architecture's prefix.

    All methods raise ValueError naming the file and the key when a value is missing, impossible or of another type.
    """

    def __init__(self, header: Header):
        self.header = header
        self.values = header.metadata
        self.architecture = self.values.get("general.architecture")
        self.blocks = {int(match[1]) for name in header.tensors if (match := BLOCK.match(name))}

    def refuse(self, why: str) -> NoReturn:
        raise ValueError(f"{self.header.path}: {why}")

    def stated(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.values

    def count(self, key: str, default: int | None = None, smallest: int = 1) -> int:
        """A whole number; an array with one value for every layer counts as that value."""
        value = self._value(key, default)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if isinstance(value, list):
            self.refuse(f"{self.architecture}.{key} differs from layer to layer, which is not served")
        if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value < LIMIT:
            self.refuse(f"{self.architecture}.{key} is {value!r}, a whole number from {smallest} was expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self.refuse(f"{self.architecture}.{key} is {value!r}, a number above 0 was expected")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            self.refuse(f"{self.architecture}.{key} is {value!r}, text was expected")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(f"{self.architecture}.{key}", default)
        if value is None:
            self.refuse(f"metadata {self.architecture}.{key} is missing; convert the model again")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def tensor(self, name: str) -> Tensor:
        if name not in self.header.tensors:
            self.refuse(f"tensor {name} is missing; take another conversion of the model")
        return self.header.tensors[name]

    def tokens(self) -> list[str]:
        """The vocabulary."""
        return self.strings("tokenizer.ggml.tokens")

    def strings(self, key: str) -> list[str]:
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            self.refuse(f"metadata {key} is missing or not a list of strings; give --tokenizer")
        return value

    def token_id(self, key: str) -> int | None:
        """A token id under tokenizer.ggml, None where the file states none."""
        value = self.values.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        size = len(self.tokens())
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
            self.refuse(f"tokenizer.ggml.{key} is {value!r}, an id below {size} was expected")
        return value

    def token_ids(self) -> dict[str, int]:
        """bos_token_id, eos_token_id and pad_token_id, those that the file states."""
        found = {name: self.token_id(key) for name, key in TOKEN_IDS.items()}
        return {name: value for name, value in found.items() if value is not None}

    def end_ids(self) -> list[int]:
        """Ids that end generation: end of text, of turn and of message, and what the chat template ends a turn with."""
        stated = [self.token_id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
        template = self.values.get("tokenizer.chat_template")
        if isinstance(template, str) and (written := [token for token in END_OF_TURN if token in template]):
            types = self.values.get("tokenizer.ggml.token_type") or []
            wanted = set(written)
            control = (
                index
                for index, (token, kind) in enumerate(zip(self.tokens(), types, strict=False))
                if token in wanted and kind == CONTROL
            )
            stated.extend(control)
        return list(dict.fromkeys(value for value in stated if value is not None))
