"""The options of `onewave serve` beside the model."""

from dataclasses import dataclass, field

from onewave.base.errors import InvalidArgumentError, check_one_of
from onewave.engine.arguments import seconds, whole
from onewave.server.answers.reasoning import MARKS
from onewave.server.answers.style import AUTO, NONE
from onewave.server.answers.tool_calls import FORMS


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Which callers and how much the server lets in, and how it reports on that.

    model_names: what the model is called, the first in answers; () is the model's own name. api_keys: () lets every
    caller in. cors_origins: origins whose pages may call ("*": all). max_body_bytes, max_header_bytes: of a request.
    header_seconds, body_seconds: until a request's headers, and then its body, have come. drain_seconds: what runs gets
    so long to end after SIGTERM. vllm_metric_names: `vllm:` before metrics' names, not `onewave:`.
    trust_request_chat_template: requests may bring chat templates of their own, which may compute for ever.
    tool_form, reasoning: how the model writes tool calls (a key of FORMS) and thoughts (the mark that begins them;
    "none": they are content), where its chat template does not show it.
    Raises InvalidArgumentError.
    """

    model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    max_header_bytes: int = 64 * 2**10
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    drain_seconds: float = 60.0
    log_requests: bool = False
    log_json: bool = False
    vllm_metric_names: bool = False
    trust_request_chat_template: bool = False
    tool_form: str = AUTO
    reasoning: str = AUTO

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_header_bytes"):
            whole(name, getattr(self, name), 1024)
        for name in ("header_seconds", "body_seconds", "drain_seconds"):
            seconds(name, getattr(self, name))
        check_one_of("tool_form", self.tool_form, (AUTO, *FORMS))
        check_one_of("reasoning", self.reasoning, (AUTO, NONE, *(marks.begin for marks in MARKS)))
        for key in self.api_keys:
            if not key.strip() or not key.isascii():
                raise InvalidArgumentError("api_key", got="an empty key, or not ASCII", allowed="ASCII text")
