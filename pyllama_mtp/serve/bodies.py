"""The parameters of requests; all others are refused by name. Errors in the OpenAI API's form."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)

from pyllama_mtp.arguments import nearest, require
from pyllama_mtp.errors import UsageError
from pyllama_mtp.grammar import Grammar
from pyllama_mtp.llama.vision import IMAGE_MARKER
from pyllama_mtp.settings import Sampling

from . import limits

#: Parameters of the API that would change the answer and are not supported, with their values that
#: change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
#: Where Anthropic's API is, and its names of errors, by status.
MESSAGES_PATH = "/v1/messages"
ANTHROPIC_ERRORS = {
    **{401: "authentication_error", 403: "permission_error", 404: "not_found_error"},
    **{413: "request_too_large", 429: "rate_limit_error", 500: "api_error"},
    **{501: "not_found_error", 503: "overloaded_error"},
}
#: Parameters that do not change the answer.
ABOUT = ("metadata", "prompt_cache_key", "safety_identifier", "user")


class ApiError(Exception):
    """An error response.

    Attributes:
        status: the HTTP status.
        param: the parameter at fault, or None.
        code: the error's name for programs, or None.
        headers: more headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message, param = message[: limits.MESSAGE], param and param[: limits.MESSAGE]
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self, path: str = "") -> dict[str, Any]:
        """The response's JSON, in the form of the API of this path."""
        if path.startswith(MESSAGES_PATH):
            long = self.code == "context_length_exceeded"  # clients shorten it by these words
            message = f"prompt is too long: {self.message}" if long else self.message
            kind = ANTHROPIC_ERRORS.get(self.status, "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": message}}
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        about = {"param": self.param, "code": self.code}
        kind = kinds.get(self.status, other)
        return {"error": {"message": self.message, "type": kind, **about}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request is at fault."""
    return ApiError(400, message, param=param, code=code)


def unsupported(name: str) -> ApiError:
    """400: the parameter is one that the server does not know."""
    return bad_request(
        f"the parameter {name!r} is not supported by this server; leave it out",
        name,
        "unsupported_parameter",
    )


def unsupported_content(kind: object, param: str) -> ApiError:
    """400: a part of a message that the server cannot read."""
    why = f"content of type {kind!r} is not supported: this server reads text and images"
    return bad_request(why, param, "unsupported_content")


def busy(why: str) -> ApiError:
    """503: the server has too much to do."""
    return ApiError(503, why, code="queue_full", headers={"Retry-After": "2"})


def shutting_down() -> ApiError:
    """503: the server is ending."""
    why = "the server is shutting down; try again later"
    return ApiError(503, why, code="server_shutting_down")


# -- bodies -----------------------------------------------------------------------------------

Text = Annotated[str, Field(min_length=1, max_length=limits.STOP)]
Tokens = Annotated[list[int], Field(fail_fast=True, max_length=limits.TOKENS)]
#: Objects that are looked at where they are used.
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=limits.TOOLS)]


def _some_or_all(n: int, about: ValidationInfo) -> int:
    require(n >= 1 or n == -1, about.field_name or "", n, "1 or more, or -1: what fits")
    return n


#: Tokens of an answer; -1: as many as there is room for.
MaxTokens = Annotated[int, AfterValidator(_some_or_all)]


class Strict(BaseModel):
    """A part of a request that refuses unknown parameters."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _first(cls, given: Any) -> Any:
        """Of more parameters than there are, the first ones, of which one is unknown: an error for
        each would take long. No parameter has more than two names."""
        most = 2 * len(cls.model_fields) + 1
        many = isinstance(given, dict) and len(given) > most
        return dict(islice(given.items(), most)) if many else given


class StreamOptions(Strict):
    """Options of a stream: whether it ends with its usage; and vLLM's, whether each chunk has the
    usage so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Strict):
    """A schema in OpenAI's form; it is enforced whether it is `strict` or not."""

    content: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of an answer; `schema` beside json_object is llama-server's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    content: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the answer. Raises UsageError: no schema, or one that is refused."""
        if self.type == "text":
            return None
        found = self.json_schema.content if self.json_schema else self.content
        if found is None and self.type == "json_schema":
            raise UsageError("response_format of type json_schema needs json_schema.schema")
        return Grammar.json_object() if found is None else Grammar.json_schema(found)


#: Fields of `Sampling` that are no sampling parameters of a request, or have another form there.
OTHERS = {"grammar", "logits_processors", "reasoning_budget", "seed"}
#: Parameters of which -1 is off, as 0 is.
OFF_BELOW_0 = {"top_k", "top_n_sigma"}
#: Parameters that are lists or objects, and their bounds; `Sampling` stops at the first bad entry.
BOUNDED: dict[str, Any] = {
    "logit_bias": Annotated[dict[str, Any], Field(max_length=limits.BIASES)],
    "dry_sequence_breakers": Annotated[list[Any], Field(max_length=limits.STOPS)],
}


def _parameter(one: Any, hint: Any) -> tuple[Any, Any]:
    """A field of `Sampling` as a parameter: its type, checked as there."""

    def check(value: Any) -> Any:
        if one.name in OFF_BELOW_0 and value is not None:
            value = max(0, value)
        if one.name == "logit_bias" and value is not None:
            value = {int(key) if key.isdecimal() else key: bias for key, bias in value.items()}
        return None if value is None else one.metadata["kind"].check(one.name, value)

    names = {"repeat_penalty": AliasChoices("repeat_penalty", "repetition_penalty")}
    hint = BOUNDED.get(one.name, hint)
    return Annotated[hint | None, AfterValidator(check)], Field(
        None, validation_alias=names.get(one.name)
    )


if TYPE_CHECKING:
    SamplingBody = Strict
else:
    _HINTS = get_type_hints(Sampling)
    _CHECKED = {
        f.name: _parameter(f, _HINTS[f.name]) for f in fields(Sampling) if f.name not in OTHERS
    }
    SamplingBody = create_model("SamplingBody", __base__=Strict, **_CHECKED)


class Body(SamplingBody):
    """The parameters that both kinds of completion share.

    Sampling parameters have the names and bounds of :class:`.Sampling`; their defaults come from
    the model file.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    max_tokens: MaxTokens | None = None
    n: Annotated[int, Field(ge=1, le=limits.N)] = 1
    seed: int | None = None
    stop: Annotated[
        list[Text],
        Field(fail_fast=True, max_length=limits.STOPS),
        BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    ] = Field(default_factory=list)
    ignore_eos: bool = False
    return_progress: bool = False
    return_token_ids: bool = False
    response_format: ResponseFormat | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
    json_schema: dict[str, Any] | str | None = None

    @property
    def constraint(self) -> Grammar | str | None:
        """The grammar of the answer. Raises UsageError: several grammars, or a bad one."""
        schema, form = self.json_schema, self.response_format
        asked = [self.grammar, None if schema is None else Grammar.json_schema(schema)]
        given = [one for one in (*asked, form.grammar if form else None) if one is not None]
        if len(given) > 1:
            raise UsageError("give one of response_format, json_schema and grammar")
        return given[0] if given else None

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters as attributes of `Sampling`, without the seed.

        Raises UsageError: see :attr:`constraint`.
        """
        names = [one.name for one in fields(Sampling) if one.name not in OTHERS]
        given = {"grammar": self.constraint, **{name: getattr(self, name) for name in names}}
        return {name: value for name, value in given.items() if value is not None}


class CompletionBody(Body):
    """Parameters of /v1/completions."""

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(fail_fast=True, max_length=limits.PROMPTS)]
        | Annotated[list[Tokens], Field(fail_fast=True, max_length=limits.PROMPTS)]
    )
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=limits.LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more prompts; an empty list of tokens is one (empty) prompt."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if not given or isinstance(given[0], int):
            return [given]  # type: ignore[list-item]
        return list(given)


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """Where an image is: in a data URL. `detail` changes nothing."""

    url: str
    detail: str | None = None


class ImagePart(Strict):
    """An image in a message's content."""

    type: Literal["image_url"]
    image_url: Annotated[  # some clients give the URL without an object around it
        ImageUrl, BeforeValidator(lambda given: {"url": given} if isinstance(given, str) else given)
    ]


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=limits.PARTS)] = ""
    name: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise ValueError("content is required")
        return self

    @property
    def images(self) -> list[ImageUrl]:
        """Where the images are."""
        parts = [] if isinstance(self.content, str) else self.content
        return [part.image_url for part in parts if isinstance(part, ImagePart)]

    def to_template(self) -> dict[str, Any]:
        """The message as chat templates take it, with a marker for each image."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(p.text if isinstance(p, TextPart) else IMAGE_MARKER for p in content)
        found = {"role": "system" if self.role == "developer" else self.role, "content": content}
        more = {
            "name": self.name,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": self.tool_calls,
            "tool_call_id": self.tool_call_id,
        }
        return found | {key: value for key, value in more.items() if value is not None}


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=limits.MESSAGES)]


class ChatBody(Body):
    """Parameters of /v1/chat/completions.

    Not OpenAI's are `chat_template_kwargs` (more variables of the template), `enable_thinking` and
    `thinking_budget` (in tokens; see :class:`.ChatOptions`), and vLLM's `continue_final_message`:
    the model goes on with the last message, its own (`add_generation_prompt` is then false).
    """

    messages: Annotated[Messages, Field(min_length=1)]
    tools: Objects = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    max_completion_tokens: MaxTokens | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=limits.LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: Text | None = None
    enable_thinking: bool | None = None
    thinking_budget: Annotated[
        int | None,
        Field(ge=0, validation_alias=AliasChoices("thinking_budget", "thinking_budget_tokens")),
    ] = None


class TokenizeBody(Strict):
    """Parameters of /tokenize: llama-server's `content`, or vLLM's `prompt` or `messages`."""

    model: str | None = None
    content: Annotated[str | None, Field(validation_alias=AliasChoices("content", "prompt"))] = None
    messages: Messages | None = None
    add_special: Annotated[
        bool, Field(validation_alias=AliasChoices("add_special", "add_special_tokens"))
    ] = False
    parse_special: bool = True


class DetokenizeBody(Strict):
    """Parameters of /detokenize."""

    model: str | None = None
    tokens: Tokens


AnyBody = TypeVar("AnyBody", bound=Strict)


def parse(kind: type[AnyBody], data: Mapping[str, Any]) -> AnyBody:
    """The body of a request.

    Raises:
        ApiError: 400: a parameter is unknown, not supported, or has a bad value.
    """
    given = {key: value for key, value in data.items() if value is not None and key not in ABOUT}
    for name, neutral in UNSUPPORTED.items():
        if name in given and name not in kind.model_fields and given.pop(name) not in neutral:
            raise unsupported(name)
    _check_parameters(given)
    if isinstance(given.get("messages"), list):
        given["messages"] = [_without_nothing(message) for message in given["messages"]]
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        raise _explained(error) from None
    if isinstance(body, Body) and "stream_options" in body.model_fields_set and not body.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    if isinstance(body, ChatBody):
        _check_chat(body)
    return body


def schema(required: str, **types: str) -> dict[str, Any]:
    """The JSON schema of a body with parameters of these types, of which "objects" is a list."""
    objects = {"type": "array", "items": {"type": "object"}}
    kinds = {"objects": objects, "texts": {"anyOf": [{"type": "string"}, objects]}}
    properties = {name: kinds.get(kind, {"type": kind}) for name, kind in types.items()}
    return {"type": "object", "required": [required], "properties": properties}


def without_neutral(
    asked: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The parameters of another API that are given, without those whose value changes nothing, of
    these. Raises ApiError: 400: one of these has another value."""
    given = {key: value for key, value in asked.items() if value is not None}
    for name, values in neutral.items():
        if given.pop(name, None) not in (None, *values):
            raise unsupported(name)
    return given


def objects(name: str, value: Any) -> list[dict[str, Any]]:
    """A list of objects."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise bad_request(f"{name} must be a list of objects", name, "invalid_value")
    if len(value) > limits.MESSAGES:
        raise bad_request(f"{name} has at most {limits.MESSAGES} objects", name, "invalid_value")
    return value


def pop_object(given: dict[str, Any], name: str) -> dict[str, Any]:
    """The parameters within a parameter, which is taken out."""
    found = given.pop(name, {})
    if not isinstance(found, dict):
        raise bad_request(f"{name} must be an object", name, "invalid_value")
    return {key: value for key, value in found.items() if value is not None}


def _check_parameters(given: Mapping[str, Any]) -> None:
    """Refuse more than limits.PARAMETERS of all but prompts and messages."""
    large = ("prompt", "messages", "content", "tokens")
    rest = [value for name, value in given.items() if name not in large]
    n = 0
    while rest:
        value = rest.pop()
        n += limits.VALUE + (len(value) if isinstance(value, str) else 0)
        if n > limits.PARAMETERS:
            most = f"{limits.PARAMETERS:,} characters"
            raise bad_request(f"parameters other than prompts and messages have more than {most}")
        if isinstance(value, dict):
            rest += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            rest += value


def _without_nothing(message: Any) -> Any:
    """A message without the empty values that clients send back with an answer."""
    if not isinstance(message, Mapping):
        return message
    return {key: value for key, value in message.items() if value not in (None, [])}


def _check_chat(body: ChatBody) -> None:
    if sum(len(message.images) for message in body.messages) > limits.IMAGES:
        raise bad_request(f"a request has at most {limits.IMAGES} images", "messages")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad_request(
            "max_tokens and max_completion_tokens are the same; give one of them", "max_tokens"
        )
    if not body.add_generation_prompt and not body.continue_final_message:
        raise bad_request(
            "add_generation_prompt: false needs continue_final_message: true",
            "add_generation_prompt",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")


_short = reprlib.Repr()
_short.maxstring = 60


def _shorten(value: Any) -> str:
    shown = _short.repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _explained(error: ValidationError) -> ApiError:
    """The error response for an unknown parameter, or else for the first thing that is wrong."""
    found = error.errors(include_url=False)
    # Of a union, the closest alternative.
    first = max(found, key=lambda one: (one["type"] == "extra_forbidden", len(one["loc"])))
    words = [*map(str, first["loc"])]
    if words[2:3] == ["content"]:  # pydantic names the alternative, and the type after the index
        del words[5:6], words[3:4]
    if first["type"] == "extra_forbidden":
        return unsupported(".".join(words))
    if first["type"] == "union_tag_invalid":
        return unsupported_content(first["ctx"]["tag"], ".".join(words[:-1]))
    name = words[0] if words else None
    where = ".".join(words) if name == "messages" else name
    if first["type"] in ("missing", "union_tag_not_found"):
        where = where if first["type"] == "missing" else f"{where}.type"
        return bad_request(f"the parameter {where!r} is required", where, "missing_parameter")
    said = first["msg"].removeprefix("Value error, ")
    if said != first["msg"]:  # of a check of ours
        return bad_request(said, where, "invalid_value")
    given = _shorten(first.get("input"))
    words = re.findall("'(.*?)'", first.get("ctx", {}).get("expected", ""))  # of a Literal
    near = nearest(str(first.get("input")), words)
    hint = f"; did you mean {near!r}?" if near else ""
    return bad_request(f"{where} is {given}: {said.lower()}{hint}", where, "invalid_value")
