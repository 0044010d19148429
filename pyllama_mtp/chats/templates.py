"""Chat templates for models whose file has none, by the names of llama.cpp's list.

Each turn has its role, its text, and marks around both, as the model's family was trained with.
"""

from __future__ import annotations

#: For each name: what begins the text, a turn, and its words, and what ends them.
_MARKS = {
    "chatml": r'"", "<|im_start|>", "\n", "<|im_end|>\n"',
    "llama3": r"""
        "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>" """,
    "phi3": r'"", "<|", "|>\n", "<|end|>\n"',
    "zephyr": r'"", "<|", "|>\n", "<|endoftext|>\n"',
}

_TURNS = """\
{{- first }}{% for message in messages -%}
{{- opens + message.role + says + message.content | trim + ends }}
{%- endfor %}{% if add_generation_prompt %}{{ opens + "assistant" + says }}{% endif %}"""

#: Gemma calls the assistant "model"; what a system message says begins the first question.
_GEMMA = """\
{{- bos_token }}{% set ns = namespace(first="") -%}
{%- for message in messages -%}
{%- if message.role == "system" %}{% set ns.first = message.content | trim + "\\n\\n" %}{% else -%}
{{- "<start_of_turn>" + ("model" if message.role == "assistant" else message.role) + "\\n" }}
{{- ns.first + message.content | trim + "<end_of_turn>\\n" }}{% set ns.first = "" %}{% endif -%}
{%- endfor %}{% if add_generation_prompt %}{{ "<start_of_turn>model\\n" }}{% endif %}"""

#: Jinja sources by name.
TEMPLATES = {
    **{
        name: f"{{%- set first, opens, says, ends = {marks} %}}{_TURNS}"
        for name, marks in _MARKS.items()
    },
    "gemma": _GEMMA,
}
