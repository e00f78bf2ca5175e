# SPDX-License-Identifier: BSD-3-Clause
"""Tokenizer and chat template from a file give the ids that llama.cpp and the model's authors give."""

import logging

import pytest
import tiny_gguf
from test_gguf_config import header_of, with_metadata
from transformers import AutoTokenizer

from vllm_superl8.checkpoint.gguf_header import read_model
from vllm_superl8.checkpoint.gguf_tokenizer import write_tokenizer
from vllm_superl8.tools.fetch import fetch

ODD = "  In 1815,\tdon't 007\n\n naïve 日本 😀 <|x|>"


def tokenizer_of(header, folder):
    """As vLLM opens it: written, and read again by AutoTokenizer beside a config.json."""
    folder.mkdir(exist_ok=True)
    write_tokenizer(header, folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    return tokenizer_of(read_model(fetch("smollm2")), tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    return tokenizer_of(read_model(fetch("gemma3-270m")), tmp_path_factory.mktemp("gemma3"))


def test_smollm2_ids(smollm2):
    """Ids of llama.cpp's /tokenize for the same file."""
    assert smollm2.encode("The capital of France is Paris.") == [504, 3575, 282, 4649, 314, 7042, 30]
    assert smollm2.encode(" 2024") == [216, 34, 32, 34, 36]  # digits one by one
    assert smollm2.encode("<|im_start|>user\nhi<|im_end|>\n")[0::5] == [1, 198]


def test_smollm2_adds_no_bos_and_knows_its_ends(smollm2):
    assert smollm2.encode("") == []
    assert (smollm2.eos_token, smollm2.eos_token_id, smollm2.bos_token_id, smollm2.pad_token_id) == (
        "<|im_end|>",
        2,
        1,
        2,
    )
    assert smollm2.model_max_length == 8192


def test_smollm2_chat_template(smollm2):
    text = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_gemma3_ids_begin_with_bos(gemma3):
    assert gemma3.encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
    assert gemma3.encode("The capital", add_special_tokens=False) == [818, 5279]
    assert gemma3.encode("") == [2]
    assert (gemma3.bos_token_id, gemma3.eos_token_id, gemma3.pad_token_id) == (2, 1, 0)
    assert gemma3.chat_template is None


@pytest.mark.parametrize("which", ["smollm2", "gemma3"])
def test_decoding_gives_the_text_back(which, request):
    tokenizer = request.getfixturevalue(which)
    assert tokenizer.decode(tokenizer.encode(ODD, add_special_tokens=False)) == ODD


@pytest.mark.parametrize(
    "stated,pre,expected",
    [
        (True, "gpt-2", True),
        (False, "llama-bpe", False),
        (None, "gpt-2", False),
        (None, "llama-bpe", True),
        (None, "tekken", True),
    ],
)
def test_bos_is_added_where_the_file_or_its_vocabulary_says_so(tmp_path, stated, pre, expected):
    _, header = header_of(tmp_path)
    header = with_metadata(header, tokenizer__ggml__add_bos_token=stated, tokenizer__ggml__pre=pre)
    tokenizer = tokenizer_of(header, tmp_path / "t")
    assert (tokenizer.encode("the")[0] == tokenizer.bos_token_id) is expected
    assert tokenizer.encode("the", add_special_tokens=False)[0] != tokenizer.bos_token_id


def test_eos_is_added_where_the_file_says_so(tmp_path):
    _, header = header_of(tmp_path)
    tokenizer = tokenizer_of(with_metadata(header, tokenizer__ggml__add_eos_token=True), tmp_path / "t")
    assert tokenizer.encode("the")[-1] == tokenizer.eos_token_id


def test_words_that_are_tokens_are_taken_whole_before_merges(tmp_path):
    """Llama 3's vocabulary holds words that its merges do not make."""
    _, header = header_of(tmp_path)
    tokens = list(header.metadata["tokenizer.ggml.tokens"])
    tokens[300] = "zebra"
    merges = [merge for merge in header.metadata["tokenizer.ggml.merges"] if set(merge.split()) <= set(tokens)]
    merges = [merge for merge in merges if merge.replace(" ", "") in tokens]
    changes = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__merges": merges}
    whole = tokenizer_of(with_metadata(header, tokenizer__ggml__pre="llama-bpe", **changes), tmp_path / "a")
    merged = tokenizer_of(with_metadata(header, tokenizer__ggml__pre="gpt-2", **changes), tmp_path / "b")
    assert whole.encode("zebra", add_special_tokens=False) == [300]
    assert len(merged.encode("zebra", add_special_tokens=False)) > 1


def test_space_before_the_first_word_follows_the_file(tmp_path):
    _, header = header_of(tmp_path)
    pieces = ["<unk>", "<bos>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "hi", "▁hi"]
    changes = {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__tokens": pieces,
        "tokenizer__ggml__scores": [-float(index) for index in range(len(pieces))],
        "tokenizer__ggml__token_type": [2, 3, 3, *[6] * 256, *[1] * 5],
        "tokenizer__ggml__merges": None,
        "tokenizer__ggml__unknown_token_id": 0,
        "tokenizer__ggml__padding_token_id": None,
    }
    with_space = tokenizer_of(with_metadata(header, **changes), tmp_path / "a")
    without = tokenizer_of(with_metadata(header, **changes, tokenizer__ggml__add_space_prefix=False), tmp_path / "b")
    assert with_space.convert_ids_to_tokens(with_space.encode("hi", add_special_tokens=False)) == ["▁hi"]
    assert without.convert_ids_to_tokens(without.encode("hi", add_special_tokens=False)) == ["hi"]
    assert with_space.decode(with_space.encode("hi hi", add_special_tokens=False)) == "hi hi"
    assert without.decode(without.encode(" hi", add_special_tokens=False)) == " hi"


def test_named_templates_are_kept(tmp_path):
    _, header = header_of(tmp_path)
    header = with_metadata(header, **{"tokenizer__chat_template__tool_use": "tools"})
    assert tokenizer_of(header, tmp_path / "t").chat_template == {
        "default": tiny_gguf.TEMPLATE,
        "tool_use": "tools",
    }


@pytest.mark.parametrize(
    "change,match",
    [
        ({"tokenizer__ggml__model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'; .* give --tokenizer"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer__ggml__merges": ["q x"]}, "has 'q x', which does not join two tokens to a third"),
        ({"tokenizer__ggml__token_type": [1, 2]}, "token_type does not have one value for each of 512 tokens"),
        ({"tokenizer__ggml__tokens": ["a"] * 513}, "has 513 tokens, tensor token_embd.weight only 512 rows"),
        ({"tokenizer__ggml__add_bos_token": 1}, "add_bos_token is 1, true or false was expected"),
        (
            {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": None},
            "add_bos_token is true but tokenizer.ggml.bos_token_id is missing",
        ),
        ({"tokenizer__chat_template": 7}, "chat_template is not text"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_tokenizer_refuses(tmp_path, change, match):
    _, header = header_of(tmp_path)
    with pytest.raises(ValueError, match=match) as caught:
        write_tokenizer(with_metadata(header, **change), tmp_path)
    assert "qwen2.gguf" in str(caught.value)


def test_unknown_splitting_is_logged(tmp_path, caplog):
    _, header = header_of(tmp_path)
    with caplog.at_level(logging.WARNING, logger="vllm_superl8.checkpoint.gguf_tokenizer"):
        write_tokenizer(with_metadata(header, tokenizer__ggml__pre="brand-new"), tmp_path)
    assert "its vocabulary 'brand-new' splits text is not known" in caplog.text
