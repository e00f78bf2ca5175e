# SPDX-License-Identifier: BSD-3-Clause
"""From the GGUF file that a user names to what vLLM needs: a folder with configuration and tokenizer, and a loader."""

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_superl8.checkpoint.gguf_header import MAGIC, Header, read_model, shards
from vllm_superl8.checkpoint.gguf_snapshot import snapshot
from vllm_superl8.quant.gguf import plugin

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(__name__)

LOAD_FORMAT = "superl8_gguf"
"""Name of our loader for --load-format."""

METHOD = "superl8"
"""Name of our quantisation method."""

REPLACED = ("auto", "gguf", LOAD_FORMAT)
"""Load formats that become ours; "gguf" is what vllm-gguf-plugin's own patch sets. "dummy" stays."""

QUANTISATION = re.compile(r":[A-Za-z0-9_+-]+$")
"""End of a reference such as folder:Q4_K_M or organisation/repository:Q4_K_M."""


def is_reference(model: str | None) -> bool:
    """Whether `model` names a GGUF file: a path, folder:QUANT, repository:QUANT or repository/file.gguf."""
    if not isinstance(model, str) or not model:
        return False
    path = Path(model)
    if path.is_file():
        return model.endswith(".gguf") or _has_magic(path)
    if model.endswith(".gguf"):
        return True
    if not QUANTISATION.search(model):
        return False
    return plugin.module("gguf_utils").is_gguf(model)


def prepare(args: "EngineArgs") -> None:
    """Rewrite arguments that name a GGUF file so that vLLM sees a folder, weights and our loader.

    Does nothing for other models, for other quantisation methods, and the second time. The tokenizer, configuration
    and served name that the user gave are kept. Raises ValueError for a file that cannot be served.
    """
    reference = _reference(args)
    if reference is None or not _is_ours(args):
        return
    if args.load_format not in (*REPLACED, "dummy"):
        raise ValueError(f"{reference}: --load-format {args.load_format} does not read GGUF; leave it out")
    path = locate(reference, args)
    if args.tokenizer == reference:
        args.tokenizer = None
    elif is_reference(args.tokenizer):
        args.tokenizer = str(_folder(read_model(locate(args.tokenizer, args))))
    folder = _folder(read_model(path), tokenizer=args.tokenizer is None)
    if args.load_format in REPLACED:
        args.load_format = LOAD_FORMAT
    if args.config_format == "gguf":
        args.config_format = "auto"
    if args.served_model_name is None:
        args.served_model_name = [reference]
    args.quantization = METHOD
    args.model, args.model_weights = str(folder), str(path)
    logger.info("configuration and tokenizer of %s are in %s", reference, folder)


def _reference(args: "EngineArgs") -> str | None:
    """The GGUF file that the arguments name, in --model or, after vllm-gguf-plugin's patch, in model_weights."""
    if is_reference(args.model):
        return args.model
    if args.load_format != LOAD_FORMAT and is_reference(args.model_weights):
        return args.model_weights
    return None


def locate(reference: str, args: "EngineArgs") -> Path:
    """The file that a reference names, the first one of a split model; downloaded where it is in a repository.

    Raises ValueError where there is none.
    """
    path = Path(reference)
    if not path.is_file():
        path = Path(_resolve(reference, args))
    return shards(path.absolute())[0]


def _resolve(reference: str, args: "EngineArgs") -> str:
    names, files = plugin.module("gguf_utils"), plugin.module("weight_utils")
    place, _, quantisation = reference.rpartition(":")
    if names.is_local_gguf_quant(reference):
        return files.resolve_local_gguf(place, quantisation)
    if names.is_remote_gguf(reference):
        return files.download_gguf(place, quantisation, cache_dir=args.download_dir, revision=args.revision)
    repository, _, file = reference.rpartition("/")
    if repository.count("/") != 1 or repository.startswith((".", "/", "~")):
        raise ValueError(f"{reference}: there is no such file")
    from huggingface_hub import hf_hub_download

    try:
        return hf_hub_download(repository, file, cache_dir=args.download_dir, revision=args.revision)
    except OSError as error:
        raise ValueError(f"{reference}: neither a file here nor to be had from a repository ({error})") from error


def _folder(header: Header, tokenizer: bool = True) -> Path:
    from vllm_superl8.quant.gguf.weights import check

    return snapshot(header, partial(check, header), tokenizer=tokenizer)


def _is_ours(args: "EngineArgs") -> bool:
    from vllm.platforms import current_platform

    ours = type(current_platform).__module__.startswith("vllm_superl8.")
    return args.quantization == METHOD or (args.quantization is None and ours)


def _has_magic(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
