# SPDX-License-Identifier: BSD-3-Clause
"""``superl8 eval``: perplexity of a text file and GSM8K from a local file, by lm-eval on vLLM; nothing is downloaded.

Tasks are lm-eval's own configurations (output_type loglikelihood_rolling and generate_until) over local JSON lines.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path

TEXT = Path(__file__).parent / "data" / "emma.txt"
PIECE = 2000
"""Characters of a document that a text is cut into: each is scored without what stands before it."""

KV_CACHE_BYTES = 1 << 30

ANSWERS = {
    "strict-match": r"#### (\-?[0-9\.\,]+)",
    "last-number": r"(-?[$0-9.,]{2,})|(-?[0-9]+)",
}
"""How an answer of GSM8K is found: as its own answers end, or the last number that was written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="checkpoint folder, GGUF file or .superl8 file, as for vllm serve")
    parser.add_argument("--text", type=Path, help="perplexity of this text file (default, without --gsm8k: Emma)")
    parser.add_argument("--gsm8k", type=Path, metavar="FILE", help="JSON lines with question and answer")
    parser.add_argument(
        "--few-shot", type=int, default=5, metavar="N", help="examples before each question (default 5)"
    )
    parser.add_argument("--chat", action="store_true", help="ask questions through the model's chat template")
    parser.add_argument("--limit", type=int, metavar="N", help="pieces of the text and questions to take")
    parser.add_argument(
        "--act", default="auto", help="auto, token, group128, or none for 16-bit weights (default auto)"
    )
    parser.add_argument("--kv", default="auto", help="KV cache format, as --kv-cache-dtype (default auto)")
    parser.add_argument("--dtype", default="auto", help="16-bit dtype, as for vLLM (default auto)")
    parser.add_argument("--max-model-len", type=int, default=2048, metavar="N", help="default 2048")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")


def run(args: argparse.Namespace) -> int:
    try:
        results = evaluate(args)
    except ImportError as error:
        print(f"eval: {error}; pip install lm-eval", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"eval: {error}", file=sys.stderr)
        return 1
    from lm_eval.utils import make_table

    print(make_table(results))
    if args.json:
        kept = {key: results[key] for key in ("results", "n-samples")}
        args.json.write_text(json.dumps({"model": args.model, "act": args.act, "kv": args.kv, **kept}, indent=1) + "\n")
    return 0


def evaluate(args: argparse.Namespace) -> dict:
    """lm-eval's results of the tasks that were asked for.

    Raises ValueError for files that are no text or no questions, ImportError where lm-eval is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local; a Hub reference has to be downloaded before
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from lm_eval import simple_evaluate

    with tempfile.TemporaryDirectory(prefix="superl8-eval-") as folder:
        tasks = []
        if args.text or not args.gsm8k:
            tasks.append(text_task(args.text or TEXT, Path(folder), args.limit))
        if args.gsm8k:
            tasks.append(gsm8k_task(args.gsm8k, Path(folder), args.few_shot, args.limit))
        os.environ["HF_DATASETS_CACHE"] = folder
        return simple_evaluate(
            model="vllm",
            model_args=model_args(args),
            tasks=tasks,
            apply_chat_template=args.chat,
            log_samples=False,
            bootstrap_iters=1000,
        )


def model_args(args: argparse.Namespace) -> dict:
    """Arguments of lm-eval's vLLM model. It reads a configuration itself, so a single file is named by its folder."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_superl8.quant.container import engine_args as container
    from vllm_superl8.quant.gguf import engine_args as gguf

    engine = EngineArgs(model=args.model, quantization="superl8")
    container.prepare(engine)
    gguf.prepare(engine)
    files = {"model_weights": engine.model_weights, "load_format": engine.load_format} if engine.model_weights else {}
    return {
        "pretrained": engine.model,
        **files,
        "quantization": "superl8",
        "dtype": args.dtype,
        "kv_cache_dtype": args.kv,
        "max_model_len": args.max_model_len,
        "max_num_batched_tokens": args.max_model_len,  # log-probabilities of a whole vocabulary for each of them
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "enforce_eager": True,
        "batch_size": "auto",
        "additional_config": {"superl8": {"ignore": ["*"]} if args.act == "none" else {"activation": args.act}},
    }


def text_task(path: Path, folder: Path, limit: int | None) -> dict:
    """Perplexity of a text, in pieces of PIECE characters that end where words do."""
    text = path.read_text()
    docs = [{"text": piece} for piece in pieces(text)][:limit]
    if not docs:
        raise ValueError(f"{path}: there is no text in it")
    return {
        "task": "text_perplexity",
        **_dataset(docs, folder / "text.jsonl"),
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "process_results": _text_results,
        "metric_list": [
            {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
            {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
            {"metric": "bits_per_byte", "aggregation": "mean", "higher_is_better": False},
        ],
        "metadata": {"version": 1.0},
    }


def pieces(text: str) -> list[str]:
    """The text in pieces of about PIECE characters, without loss."""
    found, start = [], 0
    while start < len(text):
        end = len(text) if start + PIECE >= len(text) else text.rfind(" ", start + 1, start + PIECE)
        end = start + PIECE if end <= start else end
        found.append(text[start:end])
        start = end
    return found


def _text_results(doc: dict, results: list[float]) -> dict:
    (log_likelihood,) = results
    words, size = len(doc["text"].split()), len(doc["text"].encode())
    return {
        "word_perplexity": (log_likelihood, words),
        "byte_perplexity": (log_likelihood, size),
        "bits_per_byte": -log_likelihood / size / math.log(2),
    }


def gsm8k_task(path: Path, folder: Path, few_shot: int, limit: int | None) -> dict:
    """GSM8K (Cobbe et al. 2021) from JSON lines, asked as lm-eval's task gsm8k does; the examples come from the end of
    the file and are not asked."""
    docs = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if any(not isinstance(doc, dict) or {"question", "answer"} - set(doc) for doc in docs):
        raise ValueError(f"{path}: wanted JSON lines with question and answer")
    if few_shot < 0 or len(docs) <= few_shot:
        raise ValueError(f"{path}: it has {len(docs)} questions, of which {few_shot} would be examples")
    examples = docs[len(docs) - few_shot :]
    asked = docs[: len(docs) - few_shot][:limit]
    return {
        "task": "gsm8k_local",
        **_dataset(asked, folder / "gsm8k.jsonl"),
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "num_fewshot": few_shot,
        "fewshot_config": {"sampler": "first_n", "samples": examples},
        "generation_kwargs": {"until": ["Question:", "</s>", "<|im_end|>"], "do_sample": False, "temperature": 0.0},
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "regexes_to_ignore": [",", r"\$", r"(?s).*#### ", r"\.$"],
            }
        ],
        "filter_list": [
            {
                "name": name,
                "filter": [
                    {
                        "function": "regex",
                        "regex_pattern": pattern,
                        "group_select": 0 if name == "strict-match" else -1,
                    },
                    {"function": "take_first"},
                ],
            }
            for name, pattern in ANSWERS.items()
        ],
        "metadata": {"version": 1.0},
    }


def _dataset(docs: list[dict], path: Path) -> dict:
    path.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    return {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}
