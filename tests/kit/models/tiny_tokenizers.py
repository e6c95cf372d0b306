"""Two small vocabularies trained on the corpus, as GGUF metadata.

`PYTHONPATH=tests python -m kit.models.tiny_tokenizers` trains them again (the committed golden ids then need
tests/data/make_golden.py).
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kit.paths import DATA

BYTE_LEVEL = DATA / "tiny_byte_level.json"
SENTENCEPIECE = DATA / "tiny_sentencepiece.json"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTROL_TOKENS = ["<|begin|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
USER_TOKENS = ["<think>", "</think>", "    "]


def corpus() -> dict[str, str]:
    """Name -> text of every corpus file, line endings untouched."""
    return {path.stem: path.read_bytes().decode() for path in sorted((DATA / "corpus").glob("*.txt"))}


def byte_level_directory(directory: Path, words: str, *, first_word_space: bool = False, **config: Any) -> Path:
    """A Hugging Face model directory with the byte-level vocabulary, cut into words by a regular expression."""
    metadata = byte_level_metadata("gpt-2")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    plain = len(tokens) - len(CONTROL_TOKENS) - len(USER_TOKENS)
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens[:plain])}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges="{1,3}" in words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=first_word_space, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL_TOKENS])
    backend.add_tokens([AddedToken(token, normalized=False) for token in USER_TOKENS])
    names = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    return save_directory(directory, backend, names | config)


BYTES_TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)


def bytes_directory(directory: Path) -> Path:
    """A Hugging Face model directory whose tokens are the bytes, then <|pad|>, <|eos|>, <|user|> and <|bot|>."""
    backend = Tokenizer(
        models.BPE({symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|pad|>", "<|eos|>", "<|user|>", "<|bot|>"])
    names = {"eos_token": "<|eos|>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": BYTES_TEMPLATE}
    return save_directory(directory, backend, names)


def sentencepiece_directory(directory: Path, *, prepend_scheme: str | None, **config: Any) -> Path:
    """A Hugging Face model directory with the sentencepiece vocabulary.

    prepend_scheme: of a Metaspace pre-tokenizer; None for the older form, a normalizer that puts a space before every
    stretch of text.
    """
    metadata = sentencepiece_metadata()
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    normal = {t for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == NORMAL}
    merges = [
        (token[:cut], token[cut:])
        for token in tokens  # best score first
        if token in normal
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prepend_scheme is None:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return save_directory(directory, backend, names | config)


def save_directory(directory: Path, backend: Tokenizer, config: dict[str, Any]) -> Path:
    """Write tokenizer.json and tokenizer_config.json, and a config.json that lets transformers open the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    return directory


def byte_level_metadata(pre: str, **overrides: Any) -> dict[str, Any]:
    """GGUF metadata of the byte-level vocabulary: its tokens, then the control tokens, then the user-defined ones."""
    vocabulary = json.loads(BYTE_LEVEL.read_text(encoding="utf-8"))
    tokens = vocabulary["tokens"] + CONTROL_TOKENS + USER_TOKENS
    first = len(vocabulary["tokens"])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * first
        + [CONTROL] * len(CONTROL_TOKENS)
        + [USER_DEFINED] * len(USER_TOKENS),
        "tokenizer.ggml.merges": vocabulary["merges"],
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 3,
        **overrides,
    }


def sentencepiece_metadata(**overrides: Any) -> dict[str, Any]:
    """GGUF metadata of the sentencepiece vocabulary, laid out as Llama 2's: specials, bytes, merged pieces,
    characters."""
    pieces = json.loads(SENTENCEPIECE.read_text(encoding="utf-8"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<think>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), USER_DEFINED]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [-1000.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **overrides,
    }


def write_vocabulary(path: Path, metadata: dict[str, Any]) -> None:
    """A GGUF file that holds a tokenizer and nothing else."""
    from gguf import GGUFValueType, GGUFWriter

    writer = GGUFWriter(path, "llama")
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{name}", 8)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
    for key, value in metadata.items():
        if isinstance(value, list):
            if key.endswith("token_type"):
                writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=GGUFValueType.INT32)
            else:
                writer.add_array(key, value)
        else:
            kinds[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def _train() -> None:
    texts = list(corpus().values())
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [" ".join(pair) for pair in model["merges"]]
    BYTE_LEVEL.write_text(json.dumps({"tokens": tokens, "merges": merges}, ensure_ascii=False) + "\n", encoding="utf-8")

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    # Runs of spaces and letters beyond what the corpus would give, since ties among them are where rankings show.
    runs = [*texts, *["  " * 8] * 20, *["aaaa" * 4] * 20, *["----" * 4] * 20]
    backend.train_from_iterator(runs, trainers.BpeTrainer(vocab_size=1300, limit_alphabet=400, show_progress=False))
    model = json.loads(backend.to_str())["model"]
    made = ["".join(pair) for pair in model["merges"]]
    single = sorted(token for token in model["vocab"] if len(token) == 1)
    SENTENCEPIECE.write_text(json.dumps([*dict.fromkeys(made), *single], ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _train()
