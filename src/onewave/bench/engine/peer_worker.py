"""One engine in a process of its own, for `onewave bench peers`. Run as a file, by any Python that has the engine.

Reads one JSON object a line and answers with one:

    {"peer", "path", "kind", "dtype", "device", "threads", "context"}  ->  {"ready": true, "version", "load_s"}
                                                                       or {"missing": module} or {"failed": message}
    {"prompt": [ids], "tokens": n}                                     ->  {"prefill_s", "decode_s", "token_ids"}

prefill_s is the time to the first token, decode_s the time of the n - 1 after it; end-of-text does not stop them.
Nothing at this file's top imports an engine, so that every engine is measured with its own imports alone.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[list[int], int], dict[str, Any]]
"""Prompt ids and a number of tokens -> prefill_s, decode_s and token_ids."""


def _start_onewave(job: dict[str, Any]) -> tuple[str, Run]:
    from onewave import LLM, SamplingParams, __version__

    llm = LLM(job["path"], dtype=job["dtype"], device=job["device"], max_num_seqs=1, max_model_len=job["context"])

    def run(prompt: list[int], tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        output = llm.generate([prompt], params)[0]
        metrics = output.metrics
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        return {
            "prefill_s": metrics.time_to_first_token,
            "decode_s": metrics.finished_time - metrics.first_token_time,
            "token_ids": output.outputs[0].token_ids,
        }

    return __version__, run


def _start_transformers(job: dict[str, Any]) -> tuple[str, Run]:
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    directory, file = (job["path"], None) if job["kind"] == "hf" else os.path.split(job["path"])
    extra = {} if file is None else {"gguf_file": file}
    library: Any = transformers
    dtype = getattr(torch, job["dtype"])
    model = library.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **extra).to(job["device"]).eval()
    sync: Callable[[], object] = torch.cuda.synchronize if job["device"].startswith("cuda") else lambda: None

    def run(prompt: list[int], tokens: int) -> dict[str, Any]:
        times: list[float] = []

        class Clock:
            """transformers hands it the prompt, then every token."""

            def put(self, value: object) -> None:
                sync()
                times.append(time.perf_counter())

            def end(self) -> None: ...

        ids = torch.tensor([prompt], device=job["device"])
        start = time.perf_counter()
        with torch.inference_mode():
            # No eos_token_id: generation_config's would end it early.
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                streamer=Clock(),
            )
        return {
            "prefill_s": times[1] - start,
            "decode_s": times[-1] - times[1],
            "token_ids": out[0, len(prompt) :].tolist(),
        }

    return str(library.__version__), run


def _start_llama_cpp(job: dict[str, Any]) -> tuple[str, Run]:
    import llama_cpp  # type: ignore[import-not-found] # pyright: ignore[reportMissingImports]

    library: Any = llama_cpp
    threads = job["threads"]
    llama = library.Llama(
        job["path"],
        n_ctx=job["context"],
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=-1 if job["device"].startswith("cuda") else 0,
        verbose=False,
    )

    def run(prompt: list[int], tokens: int) -> dict[str, Any]:
        # Otherwise it would find a common prefix with the last prompt and skip it.
        llama.reset()
        ids: list[int] = []
        first = start = time.perf_counter()
        for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
            if not ids:
                first = time.perf_counter()
            ids.append(int(token))
            if len(ids) == tokens:
                break
        return {"prefill_s": first - start, "decode_s": time.perf_counter() - first, "token_ids": ids}

    return str(library.__version__), run


PEERS = {"onewave": _start_onewave, "transformers": _start_transformers, "llama-cpp-python": _start_llama_cpp}
"""The engines that can be compared."""


def _main() -> None:
    # Whatever an engine prints goes to stderr: stdout carries the answers alone.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        began = time.perf_counter()
        job: dict[str, Any] = json.loads(sys.stdin.readline())
        version, run = PEERS[job["peer"]](job)
        answer({"ready": True, "version": version, "load_s": time.perf_counter() - began})
        for line in sys.stdin:
            order: dict[str, Any] = json.loads(line)
            answer(run(order["prompt"], order["tokens"]))
    except ModuleNotFoundError as error:
        answer({"missing": error.name})
    except Exception as error:
        answer({"failed": " ".join(f"{type(error).__name__}: {error}".split())[:300]})


if __name__ == "__main__":
    _main()
