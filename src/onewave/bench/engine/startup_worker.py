"""One start of a model, for `onewave bench startup`: a process of its own, as a user's first one is.

Imports, says so on a line, then reads one JSON object, {"options": LLM's arguments, "prompt": [ids], "tokens": n}, and
answers with one:

    {"import_s", "load_s", "first_answer_s", "phases", "decode_path", "compact", "peak_bytes", "kept_bytes",
     "cache_bytes"}

import_s: importing the package and PyTorch. load_s: making the LLM; phases: seconds of it by name. first_answer_s: its
first call, a prompt and n tokens. decode_path, compact: the LLM's. peak_bytes: the most that PyTorch held of the GPU's
memory until the LLM was made; kept_bytes: what it held then; null on a CPU. cache_bytes: of keys and values. An error
is raised, and stands on stderr.
"""

import json
import sys
import time
from typing import Any


def start() -> dict[str, Any]:
    """Import, wait for a job, load its model and answer once."""
    began = time.perf_counter()
    import torch

    from onewave import LLM, SamplingParams

    imported = time.perf_counter()
    print("imported", flush=True)
    job = json.loads(sys.stdin.readline())
    asked = time.perf_counter()
    llm = LLM(**job["options"])
    loaded = time.perf_counter()
    gpu = llm.device if llm.device.type == "cuda" else None
    memory = {
        "peak_bytes": None if gpu is None else torch.cuda.max_memory_allocated(gpu),
        "kept_bytes": None if gpu is None else torch.cuda.memory_allocated(gpu),
        "cache_bytes": llm.runner.cache_bytes,
    }
    questioned = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
    llm.generate([job["prompt"]], params)
    answered = time.perf_counter()
    times = {"import_s": imported - began, "load_s": loaded - asked, "first_answer_s": answered - questioned}
    return {**times, "phases": dict(llm.load_seconds), "decode_path": llm.decode_path, "compact": llm.compact, **memory}


if __name__ == "__main__":
    answer = json.dumps(start())
    print(answer, flush=True)
