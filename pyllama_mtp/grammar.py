"""Grammars for answers: GBNF, a JSON schema, a regular expression or a Lark grammar.

GBNF goes to llama.cpp's own sampler. The others go to llguidance, which also knows the tokens that
a grammar forces. llguidance does not read GBNF exactly: it takes the longest match of each word
(``root ::= w "x"``, ``w ::= [a-z]*`` then never ends), and its ``.`` matches no line end.

llguidance's limits hold for each token, but not while it reads a grammar: 100 bytes of JSON schema
can compute for hours. So a worker process reads a grammar first; see :class:`.Workers`.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from .child import BusyError, CallError, Workers
from .errors import InsufficientMemoryError, UsageError, refusal

Value = TypeVar("Value")

KINDS = ("gbnf", "json_schema", "regex", "lark")
#: Brackets that may be open at once: parsers recurse.
DEPTH = 500
#: Most characters of a grammar, and of a reason in a message.
MOST_TEXT, MOST_REASON = 1 << 18, 400
#: Bytes of stack, used or not, of a thread in which llguidance reads a grammar: it recurses along
#: chains of rules and references, and an overflow would end the process.
STACK = 512 << 20
#: White space between the parts of a JSON text, as in upstream's grammars; without a bound a small
#: model may write nothing else.
WHITESPACE = r" |\n{1,2}[ \t]{0,20}"
#: Seconds that llguidance may compute until the first token, and states (2 kB each) of its lexer.
MOST_SECONDS, MOST_STATES = 2.0, 50_000
#: Seconds that llama.cpp may compute for GBNF until the first token: its time, and that of each
#: token, grow with the square of what may come next.
MOST_GBNF_S = 0.5

workers = Workers(f"{__name__}:check_here", MOST_SECONDS, STACK + (1 << 30))
gbnf_workers = Workers("pyllama_mtp.sampling.gbnf:check_here", MOST_GBNF_S)


def require_llguidance() -> Any:
    """The package llguidance. Raises UsageError where it is missing."""
    try:
        import llguidance
    except ImportError as reason:
        raise UsageError(
            "JSON schemas, regular expressions and Lark grammars need the package llguidance "
            f"({reason}): pip install 'pyllama-mtp[structured]'"
        ) from None
    return llguidance


_stack_size = threading.Lock()


def with_room(call: Callable[[], Value]) -> Value:
    """Call in a thread whose stack has room for any grammar of MOST_TEXT; result and exceptions are
    those of `call`.

    Raises:
        UsageError: a fault in llguidance.
        InsufficientMemoryError: there is no address space for the stack.
    """

    def guarded() -> Value:
        try:
            return call()
        except Exception:
            raise
        except BaseException as panic:  # of Rust's
            raise UsageError(f"llguidance has failed: {panic}") from None

    with ThreadPoolExecutor(1, "pyllama-mtp grammar") as pool:
        with _stack_size:
            usual = threading.stack_size(STACK)
            try:
                found = pool.submit(guarded)
            except RuntimeError as reason:
                raise InsufficientMemoryError(
                    f"no memory to read a grammar ({reason}): it takes {STACK >> 20} MiB of "
                    "address space (ulimit -v)"
                ) from None
            finally:
                threading.stack_size(usual)
        return found.result()


@dataclass(frozen=True)
class Grammar:
    """A grammar that the answer follows; made with :meth:`json_schema` or the like.

    A thought is free: after a prompt that ends with ``<think>``, as templates of thinking models
    do, the answer and its grammar begin after ``</think>`` and an empty line. Any other answer
    follows its grammar from its first token.

    Attributes:
        kind: one of KINDS.
        source: the grammar's text.

    Raises:
        UsageError: not a grammar, or one that llguidance does not support; or llguidance, which all
            kinds but GBNF need, is missing; or it would compute for too long. Whether it is GBNF
            is checked when a generation starts.
    """

    kind: str
    source: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise refusal("kind", self.kind, f"one of {', '.join(KINDS)}")
        source: object = self.source
        if not isinstance(source, str) or not source:
            raise refusal(self._name, source, "text, and not empty")
        if len(source) > MOST_TEXT:
            raise UsageError(f"{self._name} has more than {MOST_TEXT:,} characters")
        opening, closing = ("(", ")") if self.kind == "gbnf" else ("([{", ")]}")
        depths = itertools.accumulate((c in opening) - (c in closing) for c in source)
        if max(depths, default=0) > DEPTH:
            raise UsageError(f"{self._name} has more than {DEPTH} parentheses open at once")
        if self.kind != "gbnf":
            require_llguidance()
        try:
            reason = _fault(self.kind, self.source)
        except BusyError as error:
            raise self.refused(str(error)) from error
        if reason:
            raise self.refused(reason)

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        """llama.cpp's GBNF, with a rule `root`."""
        return cls("gbnf", text)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that fits a schema (draft 2020-12), its properties in the schema's order.

        Args:
            schema: as a dict, or as JSON text. Keywords that llguidance does not support are
                refused: see its docs/json_schema.md.
        """
        name = "the JSON schema"
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(found, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as reason:
            raise UsageError(f"{name} is not JSON: {reason}") from None
        if not isinstance(found, Mapping):
            raise refusal(name, found, "an object: a dict, or its JSON text")
        return cls("json_schema", text)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole, in the syntax of Rust's `regex`."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """llguidance's Lark syntax, with a rule `start`; ``<tool_call>`` is a special token."""
        return cls("lark", text)

    @property
    def _name(self) -> str:
        names = ("grammar", "JSON schema", "regular expression", "Lark grammar")
        return f"the {names[KINDS.index(self.kind)]}"

    def matcher(self, tokenizer: Any) -> Any:
        """llguidance's state of a text in the grammar, for its view of a vocabulary."""
        return with_room(lambda: _matcher(tokenizer, self.kind, self.source))

    def refused(self, reason: str) -> UsageError:
        """The exception for a grammar that cannot be used."""
        listing = re.compile(r"\s*(\d+ \||\^+\s*$)")  # the line at fault, and a mark below it
        lines = [line for line in reason.splitlines() if not listing.match(line)]
        said = " ".join(" ".join(lines).split()) or reason
        return UsageError(f"{self._name} cannot be used: {said[:MOST_REASON]}")


def _compiled(kind: str, source: str) -> str:
    """A grammar in llguidance's form."""
    matcher = require_llguidance().LLMatcher
    if kind == "json_schema":
        options = {"whitespace_pattern": WHITESPACE}
        return str(matcher.grammar_from_json_schema(source, defaults=options))
    make = matcher.grammar_from_regex if kind == "regex" else matcher.grammar_from_lark
    return str(make(source))


def _matcher(tokenizer: Any, kind: str, source: str) -> Any:
    llguidance = require_llguidance()
    limits = llguidance.LLParserLimits(max_lexer_states=MOST_STATES)
    return llguidance.LLMatcher(tokenizer, _compiled(kind, source), limits=limits, log_level=0)


@lru_cache(64)
def _fault(kind: str, source: str) -> str:
    """Why a grammar cannot be used; "": it can."""
    try:
        return str(gbnf_workers.call(source) if kind == "gbnf" else workers.call(kind, source))
    except BusyError:
        raise  # and is not remembered
    except CallError as reason:
        return str(reason)


class _Bytes:
    """A vocabulary of bytes, and of what a Lark grammar may name as special tokens."""

    bos_token_id, eos_token_id = None, 256

    def __init__(self, special: Iterable[str]) -> None:
        names = ["<|end|>", *special]
        self.tokens = [bytes([i]) for i in range(256)] + [name.encode() for name in names]
        self.special_token_ids = [256 + i for i in range(len(names))]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(4)
def _tokenizer(special: tuple[str, ...]) -> Any:
    llguidance = require_llguidance()
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(special)))


def check_here(kind: str, source: str) -> str:
    """Why llguidance refuses a grammar, or "". In a worker, as a few bytes can take it for ever.

    The model's tokens are not here: any name in angle brackets is one, and any range of ids is.
    """
    llguidance, special = require_llguidance(), set[str]()
    if kind == "lark":
        source = re.sub(r"<\[[-0-9,^* ]*\]>", "<[1]>", source)
        special.update(re.findall(r"<[^<>\s]+>", source))
    tokenizer = _tokenizer(tuple(sorted(special)))

    def check() -> str:
        if reason := llguidance.LLMatcher.validate_grammar(_compiled(kind, source)):
            return str(reason)
        matcher = _matcher(tokenizer, kind, source)
        matcher.compute_bitmask()
        return str(matcher.get_error())

    try:
        return with_room(check)
    except ValueError as error:
        return str(error)
