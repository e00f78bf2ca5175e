# SPDX-License-Identifier: BSD-3-Clause
"""What a user can choose about ``--quantization superl8``, in one place.

Given as ``--additional-config '{"superl8": {...}}'`` with the fields of Options as keys. vLLM's own
``--quantization-config '{"ignore": [...]}'`` adds to ``ignore``; its other keys name schemes of vLLM's and are refused.
"""

from dataclasses import dataclass, fields

GROUP_SIZE = 128
"""Columns a group of the activation scheme "group128"; weights then have the same groups."""

INT4_GROUP_SIZE = 64
"""Columns a group of weights that are rounded to 4 bits while they load."""

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
    weight_bits None: 4 for layers that the checkpoint stores in 4 bits or fewer, else 8; GGUF blocks stay as they are.
                8: 4-bit codes are multiplied as int8, exactly where they have groups of 128.
                4: everything else is rounded to 4 bits in groups of 64 with zero points, too (half the memory, some
                20 dB more error). Experts and vocabulary matrices have 8 bits.
    ignore      layers to leave in 16 bit: module names, fnmatch patterns or "re:" regular expressions
    moe         quantise routed experts too
    lm_head     quantise the LM head too
    embedding   quantise the token embedding too
    """

    activation: str = "auto"
    weight_bits: int | None = None
    ignore: tuple[str, ...] = ()
    moe: bool = True
    lm_head: bool = False
    embedding: bool = False

    def __post_init__(self):
        if self.activation not in (known := ("auto", *ACTIVATIONS)):
            raise ValueError(f"superl8 option activation={self.activation!r}: choose one of {', '.join(known)}")
        if self.weight_bits not in (None, 4, 8) or isinstance(self.weight_bits, bool):
            raise ValueError(f"superl8 option weight_bits={self.weight_bits!r}: choose 4 or 8, or leave it out")
        if isinstance(self.ignore, str) or not all(isinstance(name, str) for name in self.ignore):
            raise ValueError(f"superl8 option ignore={self.ignore!r}: wanted a list of module names or patterns")
        object.__setattr__(self, "ignore", tuple(self.ignore))
        for name in ("moe", "lm_head", "embedding"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"superl8 option {name}={getattr(self, name)!r}: wanted true or false")

    def scheme(self, default: str) -> str:
        """The activation scheme, `default` where the user leaves it to the kind of checkpoint."""
        return default if self.activation == "auto" else self.activation

    @classmethod
    def from_dict(cls, given: dict) -> "Options":
        """Raises ValueError for unknown keys and bad values, naming them."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"superl8 does not know option {', '.join(unknown)}; it knows {', '.join(known)}")
        return cls(**given)
