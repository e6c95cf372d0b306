"""`onewave serve`: a model behind OpenAI's API."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from onewave.base.errors import InvalidArgumentError, UnsupportedError
from onewave.cli import options
from onewave.cli.session import open_llm
from onewave.weights.fetch.aliases import DEFAULT_ALIAS

if TYPE_CHECKING:
    from onewave.server.kv_events import KvEventPublisher


@dataclass(frozen=True)
class _Loading(options.ModelOptions):
    """LLM's arguments, with the model as an argument."""

    model: Annotated[
        str, typer.Argument(help="Directory, GGUF file, alias, built-in configuration, or Hugging Face id.")
    ] = DEFAULT_ALIAS
    max_model_len: options.MaxModelLen = None
    tokenizer: options.Tokenizer = None
    enforce_eager: options.EnforceEager = False
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Prompts take keys and values of earlier ones that began alike from the cache.",
        ),
    ] = True
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(
            "--kv-cache-memory-bytes",
            help="What the KV cache may take. Default: what all sequences can fill, within half of a GPU's free memory,"
            " or a GiB on a CPU.",
        ),
    ] = None


@dataclass(frozen=True)
class _Serving:
    """ServeOptions and Limits, as options."""

    served_model_name: Annotated[
        list[str] | None, typer.Option("--served-model-name", help="What requests call the model; may be repeated.")
    ] = None
    api_key: Annotated[
        list[str] | None, typer.Option("--api-key", help="A key that lets a caller in; may be repeated. Default: none.")
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        typer.Option("--cors-origin", help="An origin whose pages may call; may be repeated; * is all."),
    ] = None
    max_requests: Annotated[
        int, typer.Option("--max-requests", help="Requests that wait or run; one more is answered with 429.")
    ] = 512
    max_body_bytes: Annotated[
        int, typer.Option("--max-body-bytes", help="Most bytes of a request's body; a larger one is answered with 413.")
    ] = 16 * 2**20
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", help="After SIGTERM: how long running requests have to end.")
    ] = 60.0
    step_seconds: Annotated[
        float, typer.Option("--step-seconds", help="A step that takes longer is logged, and /health answers 503.")
    ] = 60.0
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Log a line for every request.")] = False
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines are JSON objects.")] = False
    vllm_metric_names: Annotated[
        bool, typer.Option("--vllm-metric-names", help="Metrics are called vllm:..., for dashboards made for vLLM.")
    ] = False
    trust_request_chat_template: Annotated[
        bool,
        typer.Option("--trust-request-chat-template", help="Requests may bring templates, which may compute for ever."),
    ] = False
    kv_events: Annotated[
        str | None,
        typer.Option("--kv-events", help="Publish vLLM's block events on this ZeroMQ endpoint, as tcp://*:5557."),
    ] = None
    kv_events_replay: Annotated[
        str | None, typer.Option("--kv-events-replay", help="Endpoint that sends missed events again: tcp://*:5558.")
    ] = None
    kv_events_topic: Annotated[str, typer.Option("--kv-events-topic", help="Before each event.")] = ""
    kv_events_form: Annotated[
        str, typer.Option("--kv-events-form", help="maps; or arrays, as vLLM before 0.23 had them.")
    ] = "maps"
    tool_form: Annotated[
        str,
        typer.Option(
            "--tool-form",
            help="How the model writes tool calls: hermes, llama3_json, pythonic, mistral, mistral_args; "
            "auto: as its chat template shows.",
        ),
    ] = "auto"
    reasoning: Annotated[
        str, typer.Option("--reasoning", help="none: thoughts stay in the content; auto: they are reasoning_content.")
    ] = "auto"


def serve(
    *,
    loading: _Loading,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; anything but 127.0.0.1 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes any free one.")] = 8000,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Sequences that run together.")] = 16,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option("--max-num-batched-tokens", help="Prompt tokens of one pass, half as many where others decode."),
    ] = 2048,
    serving: _Serving,
) -> None:
    """Serve a model behind OpenAI's API until SIGTERM or Ctrl-C, which let running requests end."""
    missing = [name for name in ("fastapi", "uvicorn", "httptools") if find_spec(name) is None]
    if missing:
        next = "In a clone: pip install -e '.[serve]'"
        raise UnsupportedError("onewave serve", got=f"{' and '.join(missing)} not installed", next=next)
    from onewave.base.sockets import bind
    from onewave.engine.arguments import Limits
    from onewave.server.http.run import serve
    from onewave.server.options import ServeOptions

    asked = ServeOptions(
        model_names=tuple(serving.served_model_name or ()),
        api_keys=tuple(serving.api_key or ()),
        cors_origins=tuple(serving.cors_origin or ()),
        max_body_bytes=serving.max_body_bytes,
        drain_seconds=serving.drain_seconds,
        log_requests=serving.log_requests,
        log_json=serving.log_json,
        vllm_metric_names=serving.vllm_metric_names,
        trust_request_chat_template=serving.trust_request_chat_template,
        tool_form=serving.tool_form,
        reasoning=serving.reasoning,
    )
    limits = Limits(max_requests=serving.max_requests, step_seconds=serving.step_seconds)
    # Before the model loads: a taken port is known at once.
    listening = bind(host, port, what="address")
    events = _publisher(serving)
    opened = open_llm(**asdict(loading), max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    from onewave.engine.aio import AsyncLLM
    from onewave.server.served import Served

    served = Served(AsyncLLM(opened.llm, limits), asked)
    if events is not None:
        opened.llm.run_between_steps(lambda engine: engine and engine.listen(events.put))
    address = f"http://{host}:{listening.getsockname()[1]}"
    print(f"{served.names[0]} on {address} (Ctrl-C stops it)", flush=True)
    try:
        serve(served, listening)
    finally:
        if events is not None:
            events.close()


def _publisher(asked: _Serving) -> KvEventPublisher | None:
    """Return the publisher of block events, where an endpoint is given; else None."""
    if asked.kv_events is None:
        if asked.kv_events_replay is not None:
            raise InvalidArgumentError("--kv-events-replay", got="without --kv-events", allowed="with it")
        return None
    from onewave.server.kv_events import KvEventPublisher

    return KvEventPublisher(
        asked.kv_events, replay=asked.kv_events_replay, topic=asked.kv_events_topic, form=asked.kv_events_form
    )
