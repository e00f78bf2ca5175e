# SPDX-License-Identifier: BSD-3-Clause
"""Result files of benchmarks: what is in one, how it is written and rendered. benchmarks/results/ keeps them."""

import datetime
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from vllm_superl8 import __version__

CHECKOUT = Path(__file__).resolve().parents[2]

SHAPE_KEYS = (
    ("format", "m", "n", "k"),
    ("batch", "context", "q_len", "num_heads", "num_kv_heads", "head_dim", "kv_format"),
)
"""A row has the keys of one of these sets; a size that its op does not have is None."""

NUMBER = (int, float)
HEAD_KEYS = {"card": str, "driver": str, "torch": str, "commit": str, "date": str, "ceilings": dict, "rows": list}


class ResultError(Exception):
    """A result is not what validate() wants; the message says where."""


def validate(result: dict) -> None:
    """Check the content of a result file. Raises ResultError naming the first key that is wrong.

    card, driver, torch, commit   strings
    date                          ISO 8601
    ceilings                      dp4a_tops (10^12 operations a second), hbm_gbps (10^9 bytes a second), of the same run
    rows                          op, one of SHAPE_KEYS, us (microseconds), share_dp4a (None where the op's work is not
                                  arithmetic) and share_hbm of the ceilings, error (relative, against the reference)
    """
    if not isinstance(result, dict):
        raise ResultError(f"result: it is a {type(result).__name__}, wanted a dictionary")
    for key, kind in HEAD_KEYS.items():
        if not isinstance(result.get(key), kind):
            raise ResultError(f"result: {key} is {result.get(key)!r}, wanted a {kind.__name__}")
    try:
        datetime.datetime.fromisoformat(result["date"])
    except ValueError as error:
        raise ResultError(f"result: date: {error}") from None
    for key in ("dp4a_tops", "hbm_gbps"):
        _check_positive(result["ceilings"], key, "ceilings")
    if not result["rows"]:
        raise ResultError("result: rows is empty")
    for number, row in enumerate(result["rows"]):
        where = f"rows[{number}]"
        if not isinstance(row.get("op"), str):
            raise ResultError(f"result: {where} has no op")
        if not any(all(key in row for key in keys) for keys in SHAPE_KEYS):
            wanted = " or ".join(", ".join(keys) for keys in SHAPE_KEYS)
            raise ResultError(f"result: {where} has {', '.join(row)}; wanted {wanted}")
        for key in ("us", "share_hbm", *(["share_dp4a"] if row.get("share_dp4a", 0) is not None else [])):
            _check_positive(row, key, where)
        if not isinstance(row.get("error"), NUMBER) or not row["error"] >= 0:
            raise ResultError(f"result: {where}: error is {row.get('error')!r}, wanted a number of at least 0")


def _check_positive(values: dict, key: str, where: str) -> None:
    value = values.get(key)
    if not isinstance(value, NUMBER) or isinstance(value, bool) or not value > 0:
        raise ResultError(f"result: {where}: {key} is {value!r}, wanted a number above 0")


def make_result(rows: Iterable, ceilings, *, card: str, driver: str, torch_version: str) -> dict:
    """Result of measure.Row rows under measure.Ceilings, valid by validate()."""
    result = {
        "card": card,
        "driver": driver,
        "torch": torch_version,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "ceilings": {"dp4a_tops": round(ceilings.dp4a_tops, 2), "hbm_gbps": round(ceilings.hbm_gbps, 1)},
        "rows": [_row(row, ceilings) for row in rows],
    }
    validate(result)
    return result


def _row(row, ceilings) -> dict:
    seconds = row.us * 1e-6
    work = None if row.operations is None else row.operations / seconds / 1e12 / ceilings.dp4a_tops
    return {
        **row.fields,
        "us": float(f"{row.us:.5g}"),
        "share_dp4a": None if work is None else float(f"{work:.4g}"),
        "share_hbm": float(f"{row.bytes / seconds / 1e9 / ceilings.hbm_gbps:.4g}"),
        "error": float(f"{row.error:.3g}"),
    }


def commit() -> str:
    """Commit of the checkout, with "-dirty" if tracked files differ; else what the extension was built from."""
    git = ["git", "-C", str(CHECKOUT)]
    try:
        if (CHECKOUT / ".git").exists():
            head = subprocess.run(
                [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
            ).stdout.strip()
            changed = subprocess.run(
                [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
            )
            return head + ("-dirty" if changed.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"bench: git does not tell the commit ({error}); the sources' hash stands for it", file=sys.stderr)
    from vllm_superl8.ops import registry

    stamp = registry.COMPILED.build_info()["source_hash"] if registry.COMPILED else "without-kernels"
    return f"{__version__}+{stamp}"


def card_slug(card: str) -> str:
    """Card name as part of a file name: "NVIDIA H200" gives "h200"."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower().replace("nvidia", "")).strip("-")


def render(result: dict) -> str:
    """The result as an aligned table, one line a row."""
    rows = result["rows"]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [keys, *([_cell(key, row.get(key)) for key in keys] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(keys))]
    ceilings = result["ceilings"]
    head = (
        f"{result['card']}, driver {result['driver']}, torch {result['torch']}, commit {result['commit'][:12]}, "
        f"{result['date']}\nceilings: dp4a {ceilings['dp4a_tops']} TOPS, memory {ceilings['hbm_gbps']} GB/s"
    )
    table = ("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in cells)
    return "\n".join([head, *table])


def _cell(key: str, value) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if key.startswith("share_") else str(value)


def read(path: Path) -> dict:
    """The result in a file. Raises ResultError if it cannot be read or is not valid."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ResultError(f"bench: {path}: {error}") from None
    validate(result)
    return result


def write(result: dict, name: str, folder: Path) -> Path:
    """Write the result of benchmark `name` to folder/NAME-CARD.json, one row a line; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{card_slug(result['card'])}.json"
    rows = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    head = json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1)
    partial = path.with_suffix(".partial")
    partial.write_text(f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n')
    partial.replace(path)
    return path
