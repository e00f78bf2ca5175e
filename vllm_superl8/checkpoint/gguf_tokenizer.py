# SPDX-License-Identifier: BSD-3-Clause
"""The tokenizer and chat template of a GGUF file, as the files of a Hugging Face checkpoint.

transformers builds the tokenizer from the file's vocabulary (``convert_gguf_tokenizer``); what it does not take from
the file is put right here: how text is split before merging for some vocabularies, whole words taken before merges,
the space before the first word, and BOS and EOS around a prompt. Facts about ``tokenizer.ggml.pre``: llama.cpp,
src/llama-vocab.cpp.
"""

import logging
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

from vllm_superl8.checkpoint.gguf_header import Header
from vllm_superl8.checkpoint.gguf_metadata import Metadata

logger = logging.getLogger(__name__)

NAMES = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
}
"""Keys under tokenizer.ggml to transformers' names."""

SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""transformers' special tokens to keys under tokenizer.ggml."""

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
"""Values of tokenizer.ggml.model that are served."""

GPT2 = ("default", "gpt-2", "gpt2", "phi-2", "olmo", "jais", "mpt", "trillion")
"""tokenizer.ggml.pre of vocabularies that split text as GPT-2 does, which is what transformers builds."""

SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""tokenizer.ggml.pre of vocabularies that cut every digit off before splitting as GPT-2 does."""

LIKE_QWEN2 = ("stablelm2", "hunyuan")
"""tokenizer.ggml.pre of vocabularies that split as Qwen2's."""

WHOLE_WORDS_FIRST = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
"""tokenizer.ggml.pre of vocabularies that take a word which is a token as it is, and that add BOS unless told."""


def write_tokenizer(header: Header, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, where the file has one, chat_template.jinja.

    Raises ValueError naming the file for a vocabulary that is missing, contradicts itself or is of a kind not served.
    """
    from transformers import PreTrainedTokenizerFast

    fields = Metadata(header)
    backend = _backend(fields)
    tokens = fields.tokens()
    ids = {name: fields.token_id(key) for name, key in SPECIAL.items()}
    special = {name: None if index is None else tokens[index] for name, index in ids.items()}
    add_bos, add_eos = _adds(fields, "bos", _adds_bos_unless_told(fields)), _adds(fields, "eos", False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=add_bos,
        add_eos_token=add_eos,
        model_max_length=fields.count("context_length"),
        clean_up_tokenization_spaces=False,
        **special,
    )
    tokenizer.chat_template = _chat_template(fields)
    tokenizer.save_pretrained(folder)


def _backend(fields: Metadata) -> Tokenizer:
    """The tokenizer proper, without BOS and EOS."""
    kind = fields.values.get("tokenizer.ggml.model")
    if kind not in (BYTE_LEVEL, SENTENCEPIECE):
        fields.refuse(f"tokenizer.ggml.model is {kind!r}; 'gpt2' and 'llama' are read, give --tokenizer for others")
    given = {name: fields.values[f"tokenizer.ggml.{key}"] for key, name in NAMES.items() if _has(fields, key)}
    _check_vocabulary(fields, given)
    try:
        from transformers.integrations.gguf import convert_gguf_tokenizer
    except ImportError as error:
        raise ImportError("GGUF tokenizers are read with transformers 5.20: pip install 'transformers<5.21'") from error
    try:
        backend, _ = convert_gguf_tokenizer(fields.architecture, given)
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{fields.header.path}: its tokenizer cannot be built ({error}); give --tokenizer") from error
    if kind == BYTE_LEVEL:
        _split_as_trained(backend, fields)
    elif not fields.values.get("tokenizer.ggml.add_space_prefix", True) and _adds_space(backend):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _has(fields: Metadata, key: str) -> bool:
    return f"tokenizer.ggml.{key}" in fields.values


def _check_vocabulary(fields: Metadata, given: dict[str, Any]) -> None:
    tokens = fields.tokens()
    rows = fields.tensor("token_embd.weight").shape[0]
    if len(tokens) > rows:
        fields.refuse(f"the vocabulary has {len(tokens)} tokens, tensor token_embd.weight only {rows} rows")
    for key in ("scores", "token_type"):
        values = given.get(key)
        if values is not None and (not isinstance(values, list) or len(values) != len(tokens)):
            fields.refuse(f"tokenizer.ggml.{key} does not have one value for each of {len(tokens)} tokens")
    if given["tokenizer_type"] == SENTENCEPIECE and "scores" not in given:
        fields.refuse("metadata tokenizer.ggml.scores is missing; give --tokenizer")
    if given["tokenizer_type"] == BYTE_LEVEL:
        known = set(tokens)
        for merge in fields.strings("tokenizer.ggml.merges"):
            left, _, right = merge.partition(" ")
            if not (left in known and right in known and left + right in known):
                fields.refuse(f"tokenizer.ggml.merges has {merge!r}, which does not join two tokens to a third")


def _split_as_trained(backend: Tokenizer, fields: Metadata) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    pre = fields.values.get("tokenizer.ggml.pre", "default")
    if pre in SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in LIKE_QWEN2:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre not in GPT2 and pre not in GGUF_PRE_TOKENIZER_SPLITS:
        logger.warning(
            "%s: how its vocabulary %r splits text is not known, text is split as GPT-2 does; give --tokenizer if "
            "answers look wrong",
            fields.header.path,
            pre,
        )
    if pre in WHOLE_WORDS_FIRST:
        backend.model.ignore_merges = True


def _adds_space(backend: Tokenizer) -> bool:
    return isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace)


def _adds_bos_unless_told(fields: Metadata) -> bool:
    if fields.values["tokenizer.ggml.model"] == SENTENCEPIECE:
        return True
    return fields.values.get("tokenizer.ggml.pre") in WHOLE_WORDS_FIRST


def _adds(fields: Metadata, which: str, default: bool) -> bool:
    """Whether prompts get BOS or EOS."""
    value = fields.values.get(f"tokenizer.ggml.add_{which}_token", default)
    if not isinstance(value, bool):
        fields.refuse(f"tokenizer.ggml.add_{which}_token is {value!r}, true or false was expected")
    if value and fields.token_id(f"{which}_token_id") is None:
        fields.refuse(f"tokenizer.ggml.add_{which}_token is true but tokenizer.ggml.{which}_token_id is missing")
    return value


def _chat_template(fields: Metadata) -> str | dict[str, str] | None:
    """The file's template; where it has named ones too, all of them by name."""
    prefix = "tokenizer.chat_template"
    default = fields.values.get(prefix)
    named = {
        key.removeprefix(f"{prefix}."): value for key, value in fields.values.items() if key.startswith(f"{prefix}.")
    }
    if not isinstance(default, str | None) or not all(isinstance(value, str) for value in named.values()):
        fields.refuse(f"{prefix} is not text; give --chat-template")
    if named and default is not None:
        return {"default": default, **named}
    if default is None:
        logger.info("%s has no chat template; chat requests need --chat-template", fields.header.path)
    return default
