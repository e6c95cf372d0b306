"""Chat templates in the manner of well-known model families, written for these tests."""

from typing import Any

from kit.models.tiny_tokenizers import byte_level_metadata
from onewave.engine.text.gguf_tokenizer import gguf_tokenizer_parts
from onewave.engine.text.tokenizer import Tokenizer

# Digits one by one, as Qwen2's.
DIGIT_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = """{%- for m in messages %}
    {{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA3 = """{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|im_start|>' + message['role'] + '<|end_of_text|>\\n\\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant<|end_of_text|>\\n\\n' }}
{%- endif %}"""
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}"
    "{% for message in rest %}{% if loop.index0 == 0 and system %}"
    "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" }}
        {%- else %}
            {{- "[INST] " }}
        {%- endif %}
        {%- if message["content"] is string %}
            {{- message["content"] }}
        {%- else %}
            {%- for part in message["content"] %}{{ part["text"] }}{% endfor %}
        {%- endif %}
        {{- "[/INST]" }}
    {%- else %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}"""
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
TEMPLATES = {
    "smollm2": SMOLLM2,
    "chatml": CHATML,
    "llama 3": LLAMA3,
    "llama 2": LLAMA2,
    "mistral": MISTRAL,
    "qwen 3": QWEN3,
}


def with_template(template: str, **overrides: Any) -> Tokenizer:
    metadata = byte_level_metadata("qwen2", **{"tokenizer.chat_template": template}, **overrides)
    return Tokenizer(gguf_tokenizer_parts(metadata, "tiny.gguf"))


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]
