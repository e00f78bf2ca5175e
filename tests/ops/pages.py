# SPDX-License-Identifier: BSD-3-Clause
"""Batches over a paged KV cache for the tests of attention and cache write, and what they should give."""

from dataclasses import dataclass, field

import torch

from vllm_superl8.formats import int8, kv
from vllm_superl8.formats.layout import KV_LAYOUTS, KVLayout
from vllm_superl8.ops import paged_attention  # noqa: F401  registers the op
from vllm_superl8.ops.attend import attend

from tolerances import arithmetic_limit, relative_error

STORED = [
    ("int8", torch.float16), ("int8", torch.bfloat16), ("int8", torch.float32),
    ("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32),
]  # fmt: skip
STORED += [(name, torch.float32) for name in ("k8v8_g32", "k8v8_g16", "k8v4", "k8v3")]
"""Formats of a cache with the dtypes of queries that a test of all of them takes."""

EXACT = [("int8", torch.float32), ("fp16", torch.float16)]
"""One quantised and one floating-point format for the tests of everything else; a float32 result shows more."""

QUANTIZED = [(name, torch.float32) for name, row in KV_LAYOUTS.items() if row.quantized and row.name == name]
"""Every quantised format, for the tests of what scales and codes have to do with."""

HEAD_DIMS = [32, 64, 72, 80, 96, 112, 128, 192, 256]
CASES = [(*stored, d) for stored in STORED for d in HEAD_DIMS if stored in STORED[:4:3] or d in (64, 80, 128, 256)]
"""Every head_dim for two of STORED, those at the ends of the kernels' widths for the others."""

FEATURES = {
    "window_1": {"sliding_window": 1},
    "window_16": {"sliding_window": 16},
    "window_20": {"sliding_window": 20},
    "softcap": {"logit_softcap": 3.0},
    "sinks": {"sinks": torch.tensor([0.5, -2.0, 4.0, 1.0])},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.01])},
    "bidirectional": {"causal": False},
    "bidirectional_window": {"causal": False, "sliding_window": 9},
    "symmetric_window": {"causal": False, "sliding_window": 9, "symmetric_window": True},
    "everything": {
        "sliding_window": 20,
        "logit_softcap": 4.0,
        "sinks": torch.tensor([0.5, -2.0, 4.0, 1.0]),
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.01]),
    },
}
"""Options of paged_attention for four heads."""

GARBAGE_PAGES = (2**31 - 1, -(2**31), -1)
"""What stands in a block table beyond a sequence's pages."""


def empty_cache(kv_format: str, pages: int, num_kv_heads: int, page_size: int, head_dim: int, *, gap: int = 0):
    """A cache of NaN (quantised: codes of -1, scales of NaN), pages `gap` bytes (a multiple of 16) apart."""
    dtype = kv.STORAGE[kv_format]
    page_bytes = page_size * KV_LAYOUTS[kv_format].token_bytes(head_dim)
    raw = torch.full((pages, num_kv_heads * page_bytes + gap), 255, dtype=torch.uint8)
    content = page_bytes // page_size // dtype.itemsize
    return raw[:, : num_kv_heads * page_bytes].view(dtype).unflatten(-1, (num_kv_heads, page_size, content))


def activations(generator: torch.Generator, tokens: int, heads: int, head_dim: int, mean: float = 0.0) -> torch.Tensor:
    """(tokens, heads, head_dim) float32: normal, each channel with its own mean, every 16th ten times as large."""
    x = torch.randn(tokens, heads, head_dim, generator=generator)
    x += mean * torch.randn(heads, head_dim, generator=generator)
    x[..., 5::16] *= 10
    return x


@dataclass
class Batch:
    """Sequences of query_lens new tokens at the end of seq_lens keys.

    Pages lie in the cache in random order, each filled up to its sequence's length; everything else in it is NaN, and
    block tables end in garbage, with a sliding window also in place of pages that lie before every window. `padding`
    query tokens and one empty sequence follow the last one.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    kv_format: str = "int8"
    dtype: torch.dtype = torch.float16
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    padding: int = 0
    seed: int = 0
    options: dict = field(default_factory=dict)  # of paged_attention, from causal on

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.num_kv_heads, self.head_dim)
        counts = [-(-n // self.page_size) for n in self.seq_lens]
        total = sum(counts) + 3
        order = torch.randperm(total, generator=generator)
        self.cache = empty_cache(self.kv_format, total, self.num_kv_heads, self.page_size, self.head_dim, gap=32)
        width = max(counts, default=0) + 2
        garbage = torch.tensor(GARBAGE_PAGES).repeat(width)[:width]
        self.block_table = garbage.repeat(len(self.seq_lens) + 1, 1).to(torch.int32)
        used = 0
        for seq, (count, seq_len) in enumerate(zip(counts, self.seq_lens, strict=True)):
            pages = order[used : used + count]
            used += count
            self.block_table[seq, :count] = pages.to(torch.int32)
            position = torch.arange(seq_len)
            slots = pages[position // self.page_size] * self.page_size + position % self.page_size
            key = activations(generator, seq_len, *shape, mean=2.0)
            value = activations(generator, seq_len, *shape, mean=0.5)
            hidden = self.hidden_pages(seq)
            slots[: hidden * self.page_size] = -1
            kv.encode(self.cache, self.layout, key, value, slots)
            self.block_table[seq, :hidden] = garbage[:hidden]
        tokens = sum(self.query_lens)
        # Logits of a few units: attention that is neither flat nor on one key.
        query = activations(generator, tokens + self.padding, self.num_heads, self.head_dim)
        query[..., 5::16] /= 100
        self.query = query.to(self.dtype)
        self.seq_lens_tensor = torch.tensor([*self.seq_lens, 0], dtype=torch.int32)
        starts = torch.tensor([0, *self.query_lens, 0]).cumsum(0)
        self.query_start_loc = starts.to(torch.int32)

    def hidden_pages(self, seq: int) -> int:
        """Pages of a sequence that no query token sees."""
        window = self.options.get("sliding_window", 0)
        first = self.seq_lens[seq] - self.query_lens[seq]
        return max(0, first - window + 1) // self.page_size if window else 0

    @property
    def layout(self) -> KVLayout:
        return KV_LAYOUTS[self.kv_format]

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5

    def call(self, kernels, num_splits: int = 1, max_query_len: int | None = None) -> torch.Tensor:
        """paged_attention's kernel on this batch: (tokens + padding, num_heads, head_dim), its rows strided."""
        device = kernels.device
        room = torch.full((self.query.shape[0], self.num_heads + 1, self.head_dim), float("nan"), dtype=self.dtype)
        out = room.to(device)[:, 1:]
        options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.options.items()}
        kernels.run(
            "paged_attention", self.query.to(device), _to(self.cache, device), out, self.block_table.to(device),
            self.seq_lens_tensor.to(device), self.query_start_loc.to(device),
            max_query_len or max(self.query_lens, default=0), num_splits, self.softmax_scale,
            self.kv_format if self.layout.quantized else "auto", **options,
        )  # fmt: skip
        return out.cpu()

    def want(self, quantize_query: bool = False) -> torch.Tensor:
        """The same in float64 from the decoded cache: (tokens, num_heads, head_dim)."""
        rows = []
        for seq, seq_len in enumerate(self.seq_lens):
            start, end = self.query_start_loc[seq].item(), self.query_start_loc[seq + 1].item()
            if start == end:
                continue
            query = self.query[start:end].double()
            if quantize_query:
                codes, scales = int8.quantize(self.query[start:end], -1)
                query = codes.double() * scales.double()
            hidden = self.hidden_pages(seq)
            pages = self.block_table[seq, hidden : -(-seq_len // self.page_size)].long()
            keys = seq_len - hidden * self.page_size
            k, v = (x[:, :keys].double() for x in kv.decode(self.cache, self.layout, pages, self.head_dim))
            first = keys - (end - start)
            options = {"causal": True, **self.options}
            if "ancestors" in options:
                options["ancestors"] = options["ancestors"][start:end]
            seen = attend(query.transpose(0, 1), k, v, first, self.softmax_scale, **options)
            rows.append(seen.transpose(0, 1))
        return torch.cat(rows)


def _to(cache: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A cache on a device, with its strides."""
    if device.type == "cpu":
        return cache
    moved = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=device)
    return moved.copy_(cache)


def check(kernels, batch: Batch, num_splits: int = 1, max_query_len: int | None = None) -> torch.Tensor:
    """Run a batch: every token within the limit of float64 arithmetic (on the quantised query if the cache is), and
    nothing written beyond the last one. Returns the result."""
    got = batch.call(kernels, num_splits, max_query_len)
    tokens = sum(batch.query_lens)
    assert torch.isnan(got[tokens:]).all(), "padding was written"
    want = batch.want(quantize_query=batch.layout.quantized)
    assert relative_error(got[:tokens], want) < arithmetic_limit("paged_attention", batch.dtype)
    return got[:tokens]
