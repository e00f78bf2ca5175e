# SPDX-License-Identifier: BSD-3-Clause
"""``superl8 verify``: CRCs of a ``.superl8`` file, and its values against the checkpoint it was made from."""

import argparse
import json
import math
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the .superl8 file")
    parser.add_argument("--source", type=Path, help="checkpoint that it was made from: its values are compared")
    parser.add_argument("--min-sqnr", type=float, default=-math.inf, metavar="DB", help="fail below this SQNR")
    parser.add_argument("--all", action="store_true", help="list every quantised tensor, not only the worst ones")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from vllm_superl8.checkpoint.superl8_file import Superl8File
    from vllm_superl8.quant.container.source import open_source
    from vllm_superl8.quant.container.verify import compare, damaged

    try:
        if args.source is None and args.min_sqnr > -math.inf:
            raise ValueError("--min-sqnr compares with the checkpoint; name it with --source")
        file = Superl8File(args.file)
        with tqdm(total=len(file.header.tensors) + len(file.header.files), unit="CRC", disable=None) as bar:
            problems = damaged(file, bar.update)
        print(f"{args.file}: {len(file.header.tensors)} tensors, {len(file.header.files)} files, CRCs checked")
        rows = []
        if args.source is not None:
            source = open_source(args.source)
            with tqdm(total=source.count(), unit="tensor", disable=None) as bar:
                rows = compare(file, source, args.min_sqnr, bar.update)
    except (ValueError, OSError) as error:
        print(f"verify: {error}", file=sys.stderr)
        return 1
    _print(rows, args.all)
    if args.json is not None:
        args.json.write_text(json.dumps([_entry(row) for row in rows], indent=1) + "\n")
    problems += [f"{row.name} ({row.scheme}): {row.problem}" for row in rows if row.problem]
    for problem in problems:
        print(f"verify: {problem}", file=sys.stderr)
    return 1 if problems else 0


WORST = 10


def _print(rows: list, everything: bool) -> None:
    quantised = sorted(
        (row for row in rows if row.scheme != "raw" and row.sqnr_db is not None), key=lambda r: r.sqnr_db
    )
    if not quantised:
        return
    shown = quantised if everything else quantised[:WORST]
    print(f"{len(quantised)} quantised tensors" + ("" if everything else f", the {len(shown)} worst") + ":")
    for row in shown:
        print(f"  {row.sqnr_db:6.1f} dB  {row.scheme:13s} {row.name}")


def _entry(row) -> dict:
    ratio = None if row.sqnr_db is None or not math.isfinite(row.sqnr_db) else round(row.sqnr_db, 2)
    return {"name": row.name, "scheme": row.scheme, "sqnr_db": ratio, "problem": row.problem}
