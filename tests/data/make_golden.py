"""Write golden_llama_cpp.json: what llama.cpp makes of the corpus.

    PYTHONPATH=tests python tests/data/make_golden.py --model SmolLM2-135M-Instruct.Q4_1.gguf \\
        --llama-python /path/to/venv/bin/python

Run with this project's Python (it needs the gguf package); --llama-python is one that can import llama_cpp. Committed
ids were made by the version that the file's "made_by" names.
"""

import argparse
import hashlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from kit.models.tiny_tokenizers import (
    DATA,
    byte_level_metadata,
    corpus,
    sentencepiece_metadata,
    write_vocabulary,
)

GOLDEN = DATA / "golden_llama_cpp.json"
PRE_TOKENIZERS = ("llama-bpe", "smollm", "qwen2", "gpt-2", "default")
# Others, of whose ids a digest is kept.
DIGESTED = (
    *("tekken", "deepseek-coder", "deepseek-v3", "seed-coder", "viking", "minerva-7b", "trillion", "mellum", "megrez"),
    *("pixtral", "midm-2.0"),
)
SPECIAL_TEXTS = [
    "<|im_start|>user\nHi <|im_end|>\n<|im_start|>",
    "a<|im_end|>b <|im_end|> c\n\n<|im_end|>\n\n 7<|endoftext|>",
    "<s> [INST] one two [/INST]three</s><s>  [INST]x",
    "think <think>\n\nhard</think>\n so    much     space",
    *[" leading space", "  two", "", " ", "\n", "   \n  x"],
    *["<unk><s></s>", "<think>", "x <think> y", "<|im_start|<|im_end|>"],
]
READER = """
import json, sys
import llama_cpp
job = json.load(sys.stdin)
out = {"made_by": "llama-cpp-python " + llama_cpp.__version__}
for name, path in job["models"].items():
    model = llama_cpp.Llama(model_path=path, vocab_only=True, verbose=False)
    out[name] = [[model.tokenize(t.encode(), add_bos=False, special=s) for t in job["texts"]] for s in (False, True)]
    out[name].append([model.tokenize(t.encode(), add_bos=True, special=True) for t in ["", "hi"]])
print(json.dumps(out))
"""


def lines_of(text: str) -> list[str]:
    """The pieces between "\\n", so that "\\r" stays."""
    return text.split("\n")


def digest(ids: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest()[:16]


def compact(ids: list[list[int]], files: dict[str, str]) -> dict[str, Any]:
    """Per file: its ids as a whole, and one digest of the ids of its lines."""
    found: dict[str, Any] = {}
    at = 0
    for name, text in files.items():
        count = len(lines_of(text))
        found[name] = {"ids": ids[at], "lines": digest(ids[at + 1 : at + 1 + count])}
        at += 1 + count
    found["special texts"] = ids[at:]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--llama-python", type=Path, required=True)
    arguments = parser.parse_args()
    files = corpus() | {"space_before_digit": (DATA / "space_before_digit.txt").read_bytes().decode()}
    texts = [part for text in files.values() for part in (text, *lines_of(text))] + SPECIAL_TEXTS
    with tempfile.TemporaryDirectory() as directory:
        paths = {"smollm2": arguments.model}
        metadata = {pre: byte_level_metadata(pre) for pre in PRE_TOKENIZERS + DIGESTED}
        metadata["llama"] = sentencepiece_metadata()
        metadata["llama without prefix"] = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False})
        for name, keys in metadata.items():
            paths[name] = Path(directory, name.replace(" ", "_") + ".gguf")
            write_vocabulary(paths[name], keys)
        job = {"models": {name: str(path) for name, path in paths.items()}, "texts": texts}
        run = [str(arguments.llama_python), "-c", READER]
        done = subprocess.run(run, input=json.dumps(job), capture_output=True, text=True, check=True)
    made = json.loads(done.stdout)
    golden: dict[str, Any] = {"made_by": made.pop("made_by"), "special texts": SPECIAL_TEXTS}
    golden["digests"] = {pre: digest([*made[pre][0], *made.pop(pre)[2]]) for pre in DIGESTED}
    for name, (plain, special, with_bos) in made.items():
        as_special = compact(special, files)
        # The corpus holds hardly any control token, so the ids are kept once where both ways agree.
        kept = {key: value for key, value in as_special.items() if value != compact(plain, files)[key]}
        golden[name] = {"plain": compact(plain, files), "special where different": kept, "with bos": with_bos}
    GOLDEN.write_text(json.dumps(golden, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
