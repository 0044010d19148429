"""llama-cpp-python's high-level class, :class:`Llama`, with MTP on.

It is a :class:`.Session` with the dicts of :mod:`.serve.answers`; see docs/llama-cpp-python.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

from gguf import GGMLQuantizationType

from .errors import UsageError, refusal
from .grammar import Grammar
from .llama.model import Model
from .llama.modeloptions import ModelOptions
from .llama.native import Owned
from .models import hub
from .promptfile import ProcessedPrompt
from .scheduler import run_all
from .session import Session
from .settings import Settings
from .telemetry import BatchTelemetry

#: An answer, or a chunk of a stream, in the form of OpenAI's API.
Dict: TypeAlias = dict[str, Any]

#: Arguments of theirs that have no effect here.
IGNORED = {
    *("additional_files", "last_n_tokens_size", "local_dir_use_symlinks", "logits_all"),
    *("mirostat_eta", "mirostat_tau", "n_threads_batch", "no_perf", "numa", "verbose"),
}
STATES = "use Session.hidden_states for the states of a text"
#: Arguments of theirs that must be off, and what to do instead.
OFF = {
    **dict.fromkeys(("cache_dir", "local_dir"), "set HF_HUB_CACHE for the folder of downloads"),
    **dict.fromkeys(("rope_freq_base", "rope_freq_scale"), "give rope=RopeScaling(...)"),
    "chat_handler": "use Session(model, vision=Vision(model)) for images",
    "draft_model": "drafts come from the model's MTP head and from earlier text",
    "embedding": STATES,
    "lora_path": "give lora=FILE",
    "logits_processor": "use Session.generate with Sampling(logits_processors=...)",
    "mirostat_mode": "use temperature, top_p and min_p",
    "stopping_criteria": "iterate over the stream, and stop",
}
#: Chat formats by name, and what templates of that format write.
CHAT_FORMATS = {
    **dict.fromkeys(("chatml", "chatml-function-calling", "qwen"), "<|im_start|>"),
    **dict.fromkeys(("llama-2", "mistral-instruct"), "[INST]"),
    **{"gemma": "<start_of_turn>", "llama-3": "<|start_header_id|>"},
}
ANY_SEED = (None, -1, 0xFFFFFFFF)


class LlamaGrammar(Grammar):
    """A grammar, made as llama-cpp-python's are."""

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """From GBNF with a rule `root`. Raises UsageError: see :class:`.Grammar`."""
        return cls("gbnf", grammar)


class Llama(Owned):
    """A model and a session, with the calls and dicts of llama-cpp-python. A context manager.

    Attributes:
        model, session: the :class:`.Model` and the :class:`.Session`.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_ctx: int | None = None,
        seed: int | None = None,
        chat_format: str | None = None,
        **options: Any,
    ) -> None:
        """Load a file.

        Args:
            n_ctx: most tokens of prompt and answer; 0: the model's training length; None: as
                :class:`.Settings` chooses.
            seed: of calls that name none.
            chat_format: checked only: chats follow the template of the model's file.
            options: arguments of llama-cpp-python, and attributes of :class:`.ModelOptions` and
                :class:`.Settings`, by name.

        Raises:
            UsageError: an unknown argument, a chat format that is not the file's, or missing
                packages. For the rest see :class:`.Model` and :class:`.Session`.
        """
        try:
            from .serve import answers, bodies
        except ImportError as error:
            packages = "pip install 'pyllama-mtp[serve]'"
            raise UsageError(f"{error}; Llama needs more packages: {packages}") from None
        self._answers, self._bodies = answers, bodies
        options = _translated(options)
        names = [{one.name for one in fields(kind)} for kind in (ModelOptions, Settings)]
        for name in sorted(options.keys() - names[0] - names[1]):
            raise UsageError(f"Llama has no argument {name!r}; leave it out")
        loading, given = ({k: v for k, v in options.items() if k in known} for known in names)
        Settings(**given)  # refused before the model is loaded
        self.model = Model(model_path, **loading)
        try:
            _check_format(chat_format, self.model)
            n_ctx = self.model.n_ctx_train if n_ctx == 0 else n_ctx or 0
            self.session = Session(self.model, Settings(n_ctx=n_ctx, **given))
        except BaseException:
            self.model.close()
            raise
        self._seed = None if seed in ANY_SEED else seed
        about = (os.fspath(model_path), self.n_ctx(), None, "pyllama-mtp", int(time.time()))
        self._served = self._answers.Served(self.model, *about)

    @classmethod
    def from_pretrained(cls, repo_id: str, filename: str | None = None, **options: Any) -> Llama:
        """Download a model of a Hugging Face hub into the hub's cache, and open it.

        Args:
            filename: its name, or a pattern (`*Q8_0.gguf`); see :func:`.hub.fetch`, also for what
                it raises.
            options: see :class:`Llama`.
        """
        _translated(options)
        return cls(hub.fetch(repo_id, filename, images=False), **options)

    def __call__(self, prompt: str | list[int], **options: Any) -> Dict | Iterator[Dict]:
        """See :meth:`create_completion`."""
        return self.create_completion(prompt, **options)

    def create_completion(self, prompt: str | list[int], **options: Any) -> Dict | Iterator[Dict]:
        """Continue a text, or token ids; with `stream=True`, returns an iterator over chunks.

        Args:
            options: parameters of the server's /v1/completions (`max_tokens`, 16 by default, None
                or 0: as many as fit; `stop`, `echo`, `logprobs`, `seed`, ...), attributes of
                :class:`.Sampling` among them; and `grammar`, GBNF or a :class:`.Grammar`.

        Raises:
            UsageError: an unknown parameter, a bad value, or a prompt that is empty or too long.
        """
        return self._answer("CompletionBody", {"prompt": prompt, "max_tokens": 16} | options)

    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> Dict | Iterator[Dict]:
        """The next turn of a conversation, by the chat template of the model's file.

        Args:
            messages: as in OpenAI's API.
            options: those of the server's /v1/chat/completions; see :meth:`create_completion`.
        """
        self.session._engine.chats = True
        return self._answer("ChatBody", {"messages": messages} | options)

    def _answer(self, kind: str, options: Dict) -> Dict | Iterator[Dict]:
        """The answer to a body of this kind, or its chunks."""
        options = _translated(options)
        if options.get("max_tokens", 1) in (None, 0):
            options["max_tokens"] = -1
        if options.get("seed") in ANY_SEED:
            options["seed"] = self._seed
        if isinstance(grammar := options.get("grammar"), Grammar):
            if grammar.kind not in ("gbnf", "json_schema"):
                raise refusal("grammar", grammar, "GBNF or a JSON schema")
            name = "grammar" if grammar.kind == "gbnf" else grammar.kind
            options |= {"grammar": None, name: grammar.source}
        try:
            body = self._bodies.parse(getattr(self._bodies, kind), options)
            choices = self._answers.make_choices(self._served, body)
        except self._bodies.ApiError as error:
            raise UsageError(str(error).replace("this server", "Llama")) from None
        head = self._answers.head(self._served, body)
        by_request = {choice.request: choice for choice in choices}
        steps = run_all(self.session._engine, [*by_request], BatchTelemetry())

        def chunks() -> Iterator[Dict]:
            for step in steps:
                choice = by_request[step.request]
                if part := choice.part(step):
                    yield {**head, "choices": [choice.to_dict(part, whole=False)]}
            if body.stream_options.include_usage:
                yield {**head, "choices": [], "usage": self._answers.usage(choices, body.n)}

        if body.stream:
            return chunks()
        for _ in steps:
            pass
        told = [choice.to_dict(choice.whole(), whole=True) for choice in choices]
        return {**head, "choices": told, "usage": self._answers.usage(choices, body.n)}

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of UTF-8 text. `special`: read control tokens as such."""
        return self.model.tokenize(text.decode(), add_bos, special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: object = None, special: bool = False
    ) -> bytes:
        """The bytes of tokens. `special`: control tokens have text, too."""
        return b"".join(self.model.piece(token, special) for token in tokens)

    def create_embedding(self, *_: object, **__: object) -> Dict:
        """Raises UsageError: there are none."""
        raise UsageError(f"Llama makes no embeddings; {STATES}")

    embed = create_embedding

    def save_state(self) -> ProcessedPrompt:
        """Prompt and answer so far, for :meth:`load_state`; see :meth:`.Session.copy`."""
        return self.session.copy()

    def load_state(self, state: ProcessedPrompt) -> None:
        """Go on from a state; see :meth:`.Session.copy_from`."""
        self.session.copy_from(state)

    def reset(self) -> None:
        """Forget all processed text."""
        self.session.reset()

    def n_ctx(self) -> int:
        """Most tokens of prompt and answer."""
        return self.session.n_ctx

    def close(self) -> None:
        """Free contexts and model. May be called again."""
        self.model.close()


def _translated(options: Dict) -> Dict:
    """Arguments of theirs by our names and with our values. Raises UsageError: a value that has no
    counterpart here."""
    options = {name: value for name, value in options.items() if name not in IGNORED}
    for name, instead in OFF.items():
        if options.pop(name, None):
            raise UsageError(f"Llama has no {name}; {instead}")
    if isinstance(on := options.get("flash_attn"), bool):
        options["flash_attn"] = "on" if on else "auto"
    types = {int(one): one.name.lower() for one in GGMLQuantizationType}
    for name in ("type_k", "type_v"):
        if (kind := options.pop(name, None)) is not None:
            options[f"cache_{name}"] = types.get(kind, kind)
    if options.get("n_threads", 1) is None:
        del options["n_threads"]
    return options


def _check_format(chat_format: str | None, model: Model) -> None:
    """Raise UsageError for a chat format that is unknown, or not that of the model's file."""
    if chat_format is None:
        return
    known = [name for name, mark in CHAT_FORMATS.items() if mark in model.chat_template]
    if chat_format not in known:
        raise UsageError(
            f"the chat format {chat_format!r} cannot be used: chats follow the template of "
            f"{model.path} ({' or '.join(known) or 'no known format'}); leave chat_format out"
        )
