# SPDX-License-Identifier: BSD-3-Clause
"""What a user can choose about ``--quantization superl8``, in one place.

Given as ``--additional-config '{"superl8": {...}}'`` with the fields of Options as keys. vLLM's own
``--quantization-config '{"ignore": [...]}'`` adds to ``ignore``; its other keys name schemes of vLLM's and are refused.
"""

from dataclasses import dataclass, fields

GROUP_SIZE = 128
"""Columns a group of the activation scheme "group128"; weights then have the same groups."""

ACTIVATIONS = {"token": -1, "group128": GROUP_SIZE}
"""Activation scheme to group size along K; -1 is one scale a row."""


@dataclass(frozen=True)
class Options:
    """Choices of the method.

    activation  "auto": "token"; of a GGUF file linear layers, embedding and LM head keep the blocks and activations
                have a scale for 32 columns, experts take "group128".
                "token": one scale a token and one a weight row (fastest).
                "group128": one scale a token, or weight row, and 128 columns (more exact on models with outlier
                channels); a K that is not a multiple of 128 is padded with zeros, in experts it keeps "token", which
                the log says.
    ignore      layers to leave in 16 bit: module names, fnmatch patterns or "re:" regular expressions
    moe         quantise routed experts too
    lm_head     quantise the LM head too
    embedding   quantise the token embedding too
    """

    activation: str = "auto"
    ignore: tuple[str, ...] = ()
    moe: bool = True
    lm_head: bool = False
    embedding: bool = False

    def __post_init__(self):
        if self.activation not in (known := ("auto", *ACTIVATIONS)):
            raise ValueError(f"superl8 option activation={self.activation!r}: choose one of {', '.join(known)}")
        if isinstance(self.ignore, str) or not all(isinstance(name, str) for name in self.ignore):
            raise ValueError(f"superl8 option ignore={self.ignore!r}: wanted a list of module names or patterns")
        object.__setattr__(self, "ignore", tuple(self.ignore))
        for name in ("moe", "lm_head", "embedding"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"superl8 option {name}={getattr(self, name)!r}: wanted true or false")

    def in_blocks(self, is_gguf: bool) -> bool:
        """Whether linear layers keep the blocks of the file."""
        return is_gguf and self.activation == "auto"

    def group_size(self, is_gguf: bool) -> int:
        """Columns that share a scale: 128, or -1 for the whole row."""
        scheme = ("group128" if is_gguf else "token") if self.activation == "auto" else self.activation
        return ACTIVATIONS[scheme]

    @classmethod
    def from_dict(cls, given: dict) -> "Options":
        """Raises ValueError for unknown keys and bad values, naming them."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"superl8 does not know option {', '.join(unknown)}; it knows {', '.join(known)}")
        return cls(**given)
