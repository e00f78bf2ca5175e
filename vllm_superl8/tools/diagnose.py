# SPDX-License-Identifier: BSD-3-Clause
"""``superl8 diagnose``: what quantisation costs, against the 16-bit model, end to end and module by module."""

import argparse
import sys
from itertools import product
from pathlib import Path

TEXT = Path(__file__).parent / "data" / "emma.txt"
"""Jane Austen, Emma (1815), the first 20,000 characters; in the public domain."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="checkpoint folder, GGUF file or .superl8 file, as for vllm serve")
    parser.add_argument("--reference", help="16-bit model to compare with (default: the model itself, not quantised)")
    parser.add_argument(
        "--kv", default="auto", metavar="A,B", help="KV cache formats, as --kv-cache-dtype (default auto)"
    )
    parser.add_argument(
        "--act",
        default="auto",
        metavar="A,B",
        help="activation schemes: auto, token, group128, or none for 16-bit weights (default auto)",
    )
    parser.add_argument("--context", default="512", metavar="N,M", help="tokens of the text to run (default 512)")
    parser.add_argument("--positions", type=int, default=64, help="tokens that modules are compared at (default 64)")
    parser.add_argument("--text", type=Path, default=TEXT, help="text file (default: the beginning of Emma)")
    parser.add_argument("--dtype", default="auto", help="16-bit dtype, as for vLLM (default auto)")
    parser.add_argument("--tokenizer", help="tokenizer, where the model has none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write plots there")
    parser.add_argument("--max-kld", type=float, metavar="NATS", help="exit code 1 if a mean KLD is above")
    parser.add_argument(
        "--servers",
        nargs=2,
        metavar="URL",
        help="compare two OpenAI-compatible servers instead: the reference, then the other (http://127.0.0.1:8000/v1)",
    )
    parser.add_argument("--top", type=int, default=20, help="log-probabilities to ask servers for (default 20)")
    parser.add_argument("--prompts", type=int, default=64, help="places of the text to ask servers at (default 64)")


def run(args: argparse.Namespace) -> int:
    try:
        if args.servers:
            return _servers(args)
        if args.model is None:
            raise ValueError("name a model, or two --servers")
        return _models(args)
    except (ValueError, OSError) as error:
        print(f"diagnose: {error}", file=sys.stderr)
        return 1


def _models(args: argparse.Namespace) -> int:
    from vllm_superl8.formats.container import SUFFIX
    from vllm_superl8.tools.diagnosis.report import table, to_html, to_json
    from vllm_superl8.tools.diagnosis.runs import Format, Plan, diagnose

    if args.reference is None and args.model.endswith(SUFFIX):
        raise ValueError(f"{args.model} is quantised; name the checkpoint that it was made from with --reference")
    plan = Plan(
        model=args.model,
        reference=args.reference or args.model,
        formats=tuple(Format(kv, act) for act, kv in product(_words(args.act), _words(args.kv))),
        text=args.text.read_text(),
        contexts=tuple(sorted(_number(word, "--context") for word in _words(args.context))),
        positions=args.positions,
        dtype=args.dtype,
        tokenizer=args.tokenizer,
    )
    if unknown := {form.act for form in plan.formats} - {"auto", "token", "group128", "none"}:
        raise ValueError(f"--act {', '.join(unknown)}: choose among auto, token, group128, none")
    results = diagnose(plan, lambda text: print(f"diagnose: {text}", file=sys.stderr, flush=True))
    about = {"model": plan.model, "reference": plan.reference, "text": args.text.name, "dtype": plan.dtype}
    print(table(results))
    if args.json:
        args.json.write_text(to_json(results, about))
    if args.html:
        args.html.write_text(to_html(results, about))
    above = [
        (result.format.name, context, found.kld_mean)
        for result in results
        for context, found in result.contexts.items()
        if args.max_kld is not None and not found.kld_mean <= args.max_kld
    ]
    for name, context, kld in above:
        print(f"diagnose: {name}: mean KLD {kld:.3g} at {context} tokens, above {args.max_kld:g}", file=sys.stderr)
    return 1 if above else 0


def _servers(args: argparse.Namespace) -> int:
    from vllm_superl8.tools.diagnosis.servers import compare, summary

    found = compare(*args.servers, args.text.read_text(), prompts=args.prompts, top=args.top)
    print(summary(found))
    if args.json:
        import json

        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.max_kld is not None and not found["kld_mean"] <= args.max_kld:
        print(f"diagnose: mean KLD {found['kld_mean']:.3g} is above {args.max_kld:g}", file=sys.stderr)
        return 1
    return 0


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError(f"{text!r}: wanted words with commas between them")
    return words


def _number(word: str, what: str) -> int:
    if not word.isdecimal() or int(word) < 2:
        raise ValueError(f"{what} {word}: wanted numbers of at least 2")
    return int(word)
