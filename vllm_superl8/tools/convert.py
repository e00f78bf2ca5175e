# SPDX-License-Identifier: BSD-3-Clause
"""``superl8 convert``: a Hugging Face folder or GGUF file to one ``.superl8`` file."""

import argparse
import sys
from pathlib import Path

from vllm_superl8.formats.container import SUFFIX


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="folder of a 16-bit Hugging Face checkpoint, or a GGUF file")
    parser.add_argument("target", type=Path, help=f"file to write, for example model{SUFFIX}")
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), default=8, help="bits a weight (default 8)")
    parser.add_argument("--blocks", action="store_true", help="keep the blocks of a GGUF file where it has them")
    parser.add_argument(
        "--group",
        type=int,
        metavar="N",
        help="columns that share a scale: 128, or -1 for a whole row (default -1; 128 for GGUF and for 4 bits)",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATTERN",
        help="modules to leave in 16 bit, as *.down_proj or re:.*layers\\.0\\. (may be given several times)",
    )
    parser.add_argument("--pp-stages", type=int, default=1, metavar="N", help="pipeline stages of the shard lists")
    parser.add_argument(
        "--variant", choices=("footer", "front"), default="footer", help="where the header is (default footer)"
    )


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from vllm_superl8.quant.container.convert import Recipe, convert
    from vllm_superl8.quant.container.source import open_source

    try:
        source = open_source(args.source, args.blocks)
        if args.target.is_dir():
            raise ValueError(f"{args.target}: it is a folder; name the file to write")
        group = args.group if args.group is not None else 128 if args.bits == 4 else source.group_size
        recipe = Recipe(args.bits, group, tuple(args.keep), args.pp_stages, args.blocks)
        written = 0
        with tqdm(total=source.count(), unit="tensor", disable=None) as bar:

            def advance(name: str, nbytes: int) -> None:
                nonlocal written
                written += nbytes
                bar.update()
                bar.set_postfix_str(f"{written / 1e9:.2f} GB")

            convert(source, args.target, recipe, args.variant, advance)
    except (ValueError, OSError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"convert: interrupted; the same command goes on with {args.target}.partial", file=sys.stderr)
        return 130
    print(args.target)
    return 0
