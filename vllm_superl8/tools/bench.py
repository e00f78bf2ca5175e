# SPDX-License-Identifier: BSD-3-Clause
"""``superl8 bench``: run the files of benchmarks/, write their results, render the table.

A benchmark is benchmarks/NAME.py with a function rows(quick) that yields measure.Row after checking each result
against the op's reference.
"""

import argparse
import runpy
import sys
from pathlib import Path

from vllm_superl8.tools import results


class BenchError(Exception):
    """A benchmark cannot run; the message says why."""


def benchmarks_folder() -> Path:
    """The folder of benchmarks: of the checkout that this package runs from, or of the current folder."""
    for root in (results.CHECKOUT, Path.cwd()):
        if (root / "benchmarks" / "gemm.py").exists():
            return root / "benchmarks"
    raise BenchError("bench: there is no benchmarks/ here; run it in a checkout of the sources")


def run_benchmark(path: Path, quick: bool) -> dict:
    """Result of one benchmark file on the current card. Raises BenchError without a GPU or kernels."""
    import torch

    from vllm_superl8 import device
    from vllm_superl8.ops import registry
    from vllm_superl8.tools import measure

    if not torch.cuda.is_available():
        raise BenchError("bench: there is no GPU that torch can use; superl8 doctor says why")
    if registry.COMPILED is None:
        raise BenchError(f"bench: the kernels are missing: {registry.NO_KERNELS_REASON}")
    ceilings = measure.ceilings()
    rows = list(runpy.run_path(str(path))["rows"](quick))
    return results.make_result(
        rows,
        ceilings,
        card=torch.cuda.get_device_name(),
        driver=device.driver_version(),
        torch_version=torch.__version__,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all of benchmarks/)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of NAME-CARD.json (default benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a few shapes only")
    parser.add_argument("--show", type=Path, metavar="FILE", nargs="+", help="render result files, measure nothing")


def run(args: argparse.Namespace) -> int:
    try:
        if args.show:
            for path in args.show:
                print(results.render(results.read(path)))
            return 0
        folder = benchmarks_folder()
        known = sorted(path.stem for path in folder.glob("*.py"))
        if unknown := sorted(set(args.names) - set(known)):
            raise BenchError(f"bench: there is no {', '.join(unknown)}; choose from {', '.join(known)}")
        for name in args.names or known:
            result = run_benchmark(folder / f"{name}.py", args.quick)
            path = results.write(result, name, args.out or folder / "results")
            print(f"{results.render(result)}\nwritten to {path}", flush=True)
    except (BenchError, results.ResultError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
