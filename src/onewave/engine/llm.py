"""LLM: a model, its tokenizer and an engine behind one object."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from os import PathLike
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from onewave.base.errors import InvalidArgumentError, TokenizerError
from onewave.base.settings import Settings
from onewave.base.weight_formats import COMPACT
from onewave.engine.arguments import EngineOptions, check_place, flag
from onewave.engine.engine import Engine
from onewave.engine.grammar.compiler import Grammar, GrammarCompiler
from onewave.engine.grammar.params import StructuredOutputsParams
from onewave.engine.load import choices
from onewave.engine.load.load import load, warm_up
from onewave.engine.output import RequestOutput
from onewave.engine.params import SamplingParams
from onewave.engine.prompts import (
    ParamsLike,
    PromptLike,
    RawPrompt,
    check_params,
    pack_ids,
    parse_params,
    parse_prompts,
)
from onewave.engine.request import Detokenizer, Reader, Request, RequestState
from onewave.engine.runner import ModelRunner
from onewave.engine.scheduler.load import EngineLoad
from onewave.engine.text.conversations import ChatLayout, Conversation, num_characters, parse_conversations
from onewave.engine.text.lengths import check_length, is_long, refuse_length
from onewave.engine.thread import EngineThread
from onewave.memory.block_pool import PrefixCaching
from onewave.models.config.read import load_config
from onewave.weights.fetch.sources import resolve

if TYPE_CHECKING:
    from onewave.engine.text.tokenizer import Tokenizer
    from onewave.models.config.model_config import ModelConfig


class Job(NamedTuple):
    """A checked request. prompt: its text, where there is one. packed: its ids once more, in int32. priority,
    cache_salt: of its scheduling and its cached prefixes. grammar: what its samples follow."""

    prompt: str | None
    prompt_token_ids: list[int]
    packed: array[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    grammar: Grammar | None = None


class LLM:
    """Text from a LLaMA-family model.

    model: a directory with config.json, a GGUF file, an alias, a Hugging Face id, or with load_format="dummy" the name
    of a built-in configuration. revision: branch, tag or commit of a Hugging Face id.
    dtype: auto | float32 (on a CPU) | bfloat16 | float16; auto is float32 on a CPU, elsewhere the checkpoint's own
    16-bit type, bfloat16 for one in float32. device: auto | cpu | cuda | cuda:N.
    max_model_len: most tokens of prompt and output together; by default what the model's positions reach.
    max_num_seqs: sequences that run at once. max_num_batched_tokens: most prompt tokens of one pass, and half as many
    where others decode; longer prompts run in chunks, decode steps between them. seed: of requests that bring none, and
    of dummy weights.
    tokenizer: a directory, file or id to take it from instead. enforce_eager: no CUDA graphs.
    decode: how a token is made: "wave" (one launch a token, checked against the plain operators when the model loads),
    "graph" (a CUDA graph of plain operators) or "eager". auto takes the wave where it runs, else graphs, and logs a
    line that says why; on a CPU eager. What is named never falls back. decode_path says which one runs.
    quantization: None, or what the matrices are rounded to as the model loads: "int8" or "fp8" (e4m3) with a scale a
    row, or "int4" with a scale for 128 columns. The wave then reads that; activations, sums, cache and embedding keep
    their types. A CPU multiplies the codes. Other decode paths keep the same numbers in the model's dtype.
    "w8a8" or "fp8-w8a8": int8 or e4m3 matrices whose products round activations to the same by token; not in the wave.
    kv_cache_dtype: auto (the model's), or "int8" or "fp8" (e4m3), which hold twice the tokens. A KV head's scale is the
    checkpoint's, or made at load from a small text, and constant from then on.
    compact: with the wave, keep bfloat16 matrices in thirteen bits a weight, without loss, so that a token reads a
    fifth less. None: wherever it can be; a line is logged if a model has weights that it can't. True: or an error.
    `compact` of a loaded model says whether it has, and `load_seconds` where loading took how long, by phase.
    plan: the file of a decode step's plan that the wave runs instead of its own (`onewave tiles plan`): proved first,
    and never left for another one. It is for as many sequences and for the weight format that the model is loaded with.
    enable_prefix_caching: prompts take keys and values of earlier ones that began alike from the cache; the bits of
    their logits stay the same. kv_cache_memory_bytes: what the cache may take. None: what max_num_seqs sequences of
    max_model_len take, within half of a GPU's free memory, or on a CPU a GiB (one sequence, where that is more).
    progress: draw progress bars on stderr while loading.

    A context manager; `close()` frees the model. May be called from several threads: their requests run together.
    Raises InvalidArgumentError, UnsupportedError, ModelError, CapacityError.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 2048,
        seed: int = 0,
        load_format: str = "auto",
        tokenizer: str | PathLike[str] | None = None,
        revision: str | None = None,
        enforce_eager: bool = False,
        decode: str = "auto",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        compact: bool | None = None,
        plan: str | PathLike[str] | None = None,
        enable_prefix_caching: bool = True,
        kv_cache_memory_bytes: int | None = None,
        progress: bool = False,
    ) -> None:
        check_place("model", model)
        asked = EngineOptions(
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            seed=seed,
            load_format=load_format,
            tokenizer=tokenizer,
            revision=revision,
            enforce_eager=enforce_eager,
            decode=decode,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            compact=compact,
            plan=plan,
            enable_prefix_caching=enable_prefix_caching,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            progress=progress,
        )
        self.device = choices.choose_device(device)
        choices.check_dtype_on(dtype, self.device)
        path = choices.choose_decode(decode, enforce_eager=enforce_eager, device=self.device, planned=plan is not None)
        choices.check_compact(compact, quantization, decode=path, dtype=None)
        settings = Settings.from_env()
        location = resolve(model, settings, revision=revision, load_format=load_format, progress=progress)
        self.name, self.quantization = location.name, quantization
        self.config: ModelConfig = load_config(location)
        options = choices.resolve_load(asked, self.config, device=self.device, decode=path, settings=settings)
        self.kv_cache_dtype = options.kv_name
        self.dtype, self.max_model_len = options.dtype, options.positions(self.config)
        # The tokenizer is built by another thread while the weights load.
        with warm_up(path, location, self.config, options) as warm, ThreadPoolExecutor(1) as thread:
            loading = thread.submit(choices.find_tokenizer, tokenizer, location, settings)
            network, wave = load(path, location, self.config, warm.with_sample(loading))
            self._tokenizer, self._why_no_tokenizer = loading.result()
        self.runner = ModelRunner(
            network,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            decode="graph" if path == "auto" else path,
            wave=wave,
            kv_bytes=kv_cache_memory_bytes,
        )
        self.decode_path = self.runner.decode_path
        self.load_seconds: Mapping[str, float] = options.times.seconds
        self.compact = self.runner.stream is not None and self.runner.stream.weight_format is COMPACT
        weights = f"{self.dtype}, {quantization}"
        self._prefixes = PrefixCaching(enable_prefix_caching, self.name, weights, self.kv_cache_dtype)
        self._engine: Engine | None = self._make_engine(seed)
        self._thread = EngineThread(self._engine)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises TokenizerError when it has none."""
        if self._tokenizer is None:
            raise self._why_no_tokenizer or TokenizerError("tokenizer", got="missing")
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether it has one: without, prompts are token ids and outputs have no text."""
        return self._tokenizer is not None

    def get_tokenizer(self) -> Tokenizer:
        """`tokenizer`, under vLLM's name."""
        return self.tokenizer

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Continue one prompt or several; results in the order of the prompts.

        prompts: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these.
        sampling_params: one for all, or one a prompt; a mapping is read as SamplingParams.
        use_tqdm: draw a progress bar on stderr.
        Everything is checked before anything runs. Raises InvalidArgumentError, TokenizerError, CapacityError,
        WaveStalled, and a copy of whatever a step raised that these prompts were in.
        """
        flag("use_tqdm", use_tqdm)
        raw = parse_prompts(prompts)
        params = parse_params(sampling_params, len(raw))
        return self._run([self.prepare(prompt, each) for prompt, each in zip(raw, params, strict=True)], use_tqdm)

    def stream(self, prompt: PromptLike, sampling_params: ParamsLike | None = None) -> Iterator[RequestOutput]:
        """Continue one prompt, yielding after every token: outputs[i].text is all the text
        so far, .delta the new part.

        Text that a stop string may yet take back is not shown. The request begins with the first output that is asked
        for; closing the iterator ends it. Raises as generate, what the arguments are to blame for at the call.
        """
        raw = parse_prompts(prompt)
        if len(raw) != 1:
            raise InvalidArgumentError("prompt", got=f"{len(raw)} prompts", allowed="one; use generate for several")
        self._open_engine()
        return self._stream(self.prepare(raw[0], parse_params(sampling_params, 1)[0]))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
        *,
        use_tqdm: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role": ..., "content": ...}.

        continue_final_message: go on within the last message, with add_generation_prompt=False. tools: JSON schemas of
        functions that the model may call, for its template. chat_template: Jinja source, or the name of one of the
        model's templates, instead of the usual one. chat_template_kwargs: further variables for it.
        Raises as generate.
        """
        flag("use_tqdm", use_tqdm)
        conversations = parse_conversations(messages)
        params = parse_params(sampling_params, len(conversations))
        layout = ChatLayout(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        jobs = [self.prepare_chat(talk, each, layout) for talk, each in zip(conversations, params, strict=True)]
        return self._run(jobs, use_tqdm)

    def chat_stream(
        self,
        messages: Conversation,
        sampling_params: ParamsLike | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation, with chat's arguments, yielding as `stream` does."""
        conversations = parse_conversations(messages)
        if len(conversations) != 1:
            raise InvalidArgumentError("messages", got=f"{len(conversations)} conversations", allowed="one")
        layout = ChatLayout(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        params = parse_params(sampling_params, 1)[0]
        self._open_engine()
        return self._stream(self.prepare_chat(conversations[0], params, layout))

    def close(self) -> None:
        """End what runs and free the model; calling it again does nothing."""

        def free() -> None:
            engine, self._engine = self._engine, None
            if engine is not None:
                del self.runner
                try:
                    engine.abort_all()
                finally:
                    engine.tell_readers()

        self._thread.call(free)
        self._thread.end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _make_engine(self, seed: int) -> Engine:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return Engine(self.runner, eos_token_ids=self._eos_token_ids, seed=seed, prefixes=self._prefixes)
        from onewave.engine.text.detokenizer import IncrementalDetokenizer

        def detokenizer(prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
            return IncrementalDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)

        return Engine(
            self.runner,
            eos_token_ids=self._eos_token_ids,
            make_detokenizer=detokenizer,
            token_text=tokenizer.token_text,
            seed=seed,
            prefixes=self._prefixes,
        )

    @property
    def _eos_token_ids(self) -> list[int]:
        known = {*self.config.eos_token_ids, *(() if self._tokenizer is None else self._tokenizer.eos_token_ids)}
        return sorted(token_id for token_id in known if 0 <= token_id < self.config.vocab_size)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, vocab_size=self.config.vocab_size, eos_token_ids=self._eos_token_ids)

    def prepare(self, prompt: RawPrompt, params: SamplingParams, *, add_special_tokens: bool = True) -> Job:
        """Encode and check one prompt. Raises InvalidArgumentError, TokenizerError."""
        if prompt.text == "" and prompt.token_ids is None:
            raise InvalidArgumentError("prompt", got="empty", next="Give some text, or token ids.")
        ids = list(prompt.token_ids or ())
        if prompt.token_ids is None:
            check_length(self.tokenizer, prompt.text or "", self.max_model_len)
            ids = self.tokenizer.encode(prompt.text or "", add_special_tokens)
        return self._checked(prompt.text, ids, params)

    def prepare_chat(self, conversation: Conversation, params: SamplingParams, layout: ChatLayout) -> Job:
        """Lay one conversation out, encode and check it. Raises InvalidArgumentError, TokenizerError."""
        tokenizer = self.tokenizer
        if layout.tools and not tokenizer.reads_tools(**layout.variables()):
            got, next = "a chat template that reads none", "Pass chat_template= for one that does."
            raise InvalidArgumentError("tools", got=got, next=next)
        if is_long(num_characters(conversation), self.max_model_len):
            text = tokenizer.render_chat(conversation, layout.add_generation_prompt, **layout.variables())
            check_length(tokenizer, text, self.max_model_len)
        return self._checked(*tokenizer.lay_out_chat(conversation, layout), params)

    def _checked(self, text: str | None, ids: list[int], params: SamplingParams) -> Job:
        if len(ids) > self.max_model_len - 1:
            refuse_length(f"{len(ids)} tokens", self.max_model_len)
        size = 0 if self._tokenizer is None else self._tokenizer.vocab_size
        packed = pack_ids(ids, vocab_size=self.config.vocab_size, tokenizer_size=size)
        check_params(params, vocab_size=self.config.vocab_size, has_tokenizer=self._tokenizer is not None)
        return Job(text, ids, packed, params, grammar=None if params.form is None else self.compile_form(params.form))

    def compile_form(self, form: StructuredOutputsParams) -> Grammar:
        """The grammar of a form, in this model's tokens. Raises InvalidArgumentError, UnsupportedError."""
        return self._grammars.compile(form)

    def submit(self, job: Job, reader: Reader, answer: Callable[[Request | BaseException], object]) -> None:
        """Begin a request between two steps, without waiting for it. answer: gets the request, or what kept it from
        being made, in the engine's thread, before the reader gets any state of it."""

        def begin() -> None:
            try:
                answer(self._begin_job(job, reader))
            except Exception as error:
                answer(error)

        self._thread.submit(begin)

    def run_between_steps(self, work: Callable[[Engine | None], object]) -> None:
        """Have the engine's thread do some work between two steps, without waiting for it. None: of a closed LLM."""
        self._thread.submit(lambda: work(self._engine))

    @property
    def step_seconds(self) -> float:
        """Seconds that the step under way has taken so far; 0 between steps."""
        return self._thread.step_seconds

    @property
    def failed_steps(self) -> int:
        """Steps that raised since the last one that did not."""
        return self._thread.failed_steps

    @property
    def load(self) -> EngineLoad | None:
        """The engine's current load; None once it is closed."""
        return None if self._engine is None else self._engine.load

    def step_traceback(self) -> str:
        """Where the engine's thread is now, as text; "" where it has ended."""
        return self._thread.traceback()

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise InvalidArgumentError("LLM", got="closed", next="Make a new one.")
        return self._engine

    def _run(self, jobs: list[Job], show_progress: bool) -> list[RequestOutput]:
        requests: list[Request] = []
        updates: SimpleQueue[RequestState | None] = SimpleQueue()
        reader = Reader(updates=updates)
        with _progress_bar(len(jobs), show_progress) as show:
            try:
                self._add(jobs, requests, reader)
                for done in range(len(jobs)):
                    show(done)
                    self._thread.wait(updates)
                    raise_failures(requests)
                show(len(jobs))
            finally:
                self._abort(requests, len(jobs))
        return [request.output() for request in requests]

    def _stream(self, job: Job) -> Iterator[RequestOutput]:
        requests: list[Request] = []
        updates: SimpleQueue[RequestState | None] = SimpleQueue()
        reader = Reader(streaming=True, updates=updates)
        try:
            self._add([job], requests, reader)
            while (state := self._thread.wait(updates)) is not None:
                yield requests[0].output(state)
            raise_failures(requests)
            yield requests[0].output()
        finally:
            self._abort(requests, 1)

    def _add(self, jobs: list[Job], requests: list[Request], reader: Reader) -> None:
        """Begin all requests, between the same two steps."""

        def add() -> None:
            for job in jobs:
                requests.append(self._begin_job(job, reader))

        self._thread.call(add)

    def _begin_job(self, job: Job, reader: Reader) -> Request:
        return self._open_engine().add(
            job.prompt, job.prompt_token_ids, job.params, reader, job.grammar,
            priority=job.priority, cache_salt=job.cache_salt, packed=job.packed,
        )  # fmt: skip

    def _abort(self, requests: list[Request], count: int) -> None:
        """End what still runs as soon as the step under way is over. Interrupted, `_add` may have yet to fill the list,
        up to `count`; never waits."""

        def abort() -> None:
            for request in requests:
                if self._engine is not None:
                    self._engine.abort(request)

        if len(requests) < count or not all(request.finished for request in requests):
            self._thread.post(abort)


def raise_failures(requests: Sequence[Request]) -> None:
    """Raise what ended a request that its caller did not end: a copy, as what is raised holds the frames that hold the
    request."""
    for request in requests:
        if request.failure is not None:
            raise copy(request.failure) from request.failure.__cause__


@contextmanager
def _progress_bar(total: int, enabled: bool) -> Generator[Callable[[int], None]]:
    """Yield a function that takes the number of finished prompts."""
    if not enabled:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("Prompts", total=total)

        yield lambda done: bar.update(task, completed=done)
