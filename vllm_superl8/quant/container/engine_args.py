# SPDX-License-Identifier: BSD-3-Clause
"""From the ``.superl8`` file that a user names to what vLLM needs: a folder with configuration and tokenizer, and a
loader."""

from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_superl8.checkpoint.superl8_file import Superl8File
from vllm_superl8.checkpoint.superl8_snapshot import snapshot
from vllm_superl8.formats.container import MAGIC, SUFFIX
from vllm_superl8.quant.gguf.engine_args import METHOD

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(__name__)

LOAD_FORMAT = "superl8"
"""Name of our loader for --load-format."""


def is_container(model: str | None) -> bool:
    """Whether `model` names a ``.superl8`` file: by its suffix or its first bytes."""
    if not isinstance(model, str) or not model:
        return False
    if model.endswith(SUFFIX):
        return True
    path = Path(model)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def prepare(args: "EngineArgs") -> None:
    """Rewrite arguments that name a ``.superl8`` file so that vLLM sees a folder, weights and our loader.

    Does nothing for other models and the second time. The tokenizer, configuration and served name that the user gave
    are kept. Raises ValueError for a file that cannot be served and for arguments that contradict it.
    """
    reference = args.model
    if not is_container(reference):
        return
    if args.quantization not in (None, METHOD):
        raise ValueError(f"{reference}: --quantization {args.quantization} does not read it; it is served by {METHOD}")
    if args.load_format not in ("auto", LOAD_FORMAT, "dummy"):
        raise ValueError(f"{reference}: --load-format {args.load_format} does not read it; leave it out")
    path = Path(reference).absolute()
    if not path.is_file():
        raise ValueError(f"{reference}: there is no such file")
    file = Superl8File(path)
    folder = snapshot(file)
    if args.tokenizer == reference:
        args.tokenizer = None
    if args.tokenizer is None and not args.skip_tokenizer_init and not _has_tokenizer(file):
        raise ValueError(f"{reference}: there is no tokenizer in it; give one with --tokenizer")
    if args.load_format == "auto":
        args.load_format = LOAD_FORMAT
    if args.served_model_name is None:
        args.served_model_name = [reference]
    args.quantization = METHOD
    args.model, args.model_weights = str(folder), str(path)
    logger.info("configuration and tokenizer of %s are in %s", reference, folder)


def _has_tokenizer(file: Superl8File) -> bool:
    return any(name.startswith("tokenizer") or name == "tekken.json" for name in file.header.files)
