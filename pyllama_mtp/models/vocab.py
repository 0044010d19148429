"""A synthetic byte-level BPE vocabulary of any size, in the form GGUF files carry.

Every text can be tokenized (all 256 bytes are tokens) and common English and Python words take one
token each, so that prompts have a realistic length. The rest of the vocabulary is filled with
nonsense words that no merge makes: only a model with random weights says them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyllama_mtp.errors import UsageError

#: Token types as upstream's include/llama.h counts them.
NORMAL, CONTROL, UNUSED = 1, 3, 5

ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

#: ChatML as Qwen models use it.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_WORDS = """
the of and to in is that for it as was with be by on not he his are this at from or have an they
which one had but you were her all she there would their we him been has when who will no more if
out so said what up its about into than them can only other time new some could these two may first
then do any like my now over such our man me even most made after also well many must before where
how because good each those people state world year years life work used use number part very
system data model value values number list string file function class method object type name code
line test error return import def self None True False else elif while for print range len int str
float dict set tuple lambda yield with open raise except try assert pass break continue global async
await input output index key keys items result args kwargs path line lines text word words token
tokens write read call called example question answer because between through under while another
should without against during something nothing water light small large long short high low great
little old young right left day days night morning house city country government company market
money history science language speed memory machine computer program network learning training
""".split()  # noqa: SIM905 - a list literal would be 250 lines
_CHUNKS = ("    ", "  ", "\n\n", "\n    ", "==", "!=", "->", "()", "):", "ing", "ed", "er", "tion")
_CONSONANTS, _VOWELS = "bdfghjklmnprtvz", "aeiou"
_SYLLABLES = tuple(c + v for c in _CONSONANTS for v in _VOWELS)
#: Fewer tokens would not hold the bytes, the special tokens and a word or two.
MIN_VOCAB = 512


@dataclass(frozen=True)
class Vocabulary:
    """``tokens`` and ``types`` have n_vocab entries; ``merges`` are "left right", best first."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    endoftext: int
    im_end: int


def byte_alphabet() -> list[str]:
    """The printable stand-in for each byte 0..255 in byte-level BPE (GPT-2's bytes_to_unicode)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [""] * 256
    for byte in plain:
        letters[byte] = chr(byte)
    for offset, byte in enumerate(b for b in range(256) if not letters[b]):
        letters[byte] = chr(256 + offset)
    return letters


def synthetic_vocabulary(n_vocab: int) -> Vocabulary:
    """Build a vocabulary of exactly ``n_vocab`` tokens; deterministic.

    The special tokens stand at the end, followed by unused padding, as in the published
    vocabulary (248,320 entries of which the last 276 are special or unused).

    Raises:
        UsageError: ``n_vocab`` is below :data:`MIN_VOCAB` or above what the fillers can name.
    """
    n_reserved = min(276, n_vocab // 64)
    limit = 256 + len(_SYLLABLES) ** 3
    if not MIN_VOCAB <= n_vocab <= limit:
        raise UsageError(f"n_vocab is {n_vocab}, allowed: {MIN_VOCAB} to {limit}")
    letters = byte_alphabet()
    tokens = dict.fromkeys(letters)  # ordered and unique: the native loader insists on unique
    merges = _merges(letters, tokens, n_vocab - n_reserved)
    filler = 0
    while len(tokens) < n_vocab - n_reserved:
        tokens[letters[32] + _nonsense(filler)] = None
        filler += 1
    first = len(tokens)
    names = [*tokens, ENDOFTEXT, IM_START, IM_END]
    names += [f"[PAD{i}]" for i in range(len(names), n_vocab)]
    types = [NORMAL] * first + [CONTROL] * 3 + [UNUSED] * (n_vocab - first - 3)
    return Vocabulary(names, types, merges, first, first + 2)


def _merges(letters: list[str], tokens: dict[str, None], limit: int) -> list[str]:
    """Add tokens (up to ``limit`` in all) and return the merges that build words letter by letter.

    Each word appears bare and with a leading space; a prefix common to two words is built once.
    """
    merges: list[str] = []
    for word in (*_CHUNKS, *(w for pair in ((" " + w, w) for w in _WORDS) for w in pair)):
        spelled = [letters[b] for b in word.encode()]
        for end in range(1, len(spelled)):
            left, right = "".join(spelled[:end]), spelled[end]
            if left + right in tokens:
                continue
            if len(tokens) >= limit:
                return merges
            tokens[left + right] = None
            merges.append(f"{left} {right}")
    return merges


def _nonsense(index: int) -> str:
    """The ``index``-th three-syllable word: bababa, badaba, ..."""
    base = len(_SYLLABLES)
    a, b, c = index // base % base, index % base, index // (base * base)
    return _SYLLABLES[c] + _SYLLABLES[a] + _SYLLABLES[b]
