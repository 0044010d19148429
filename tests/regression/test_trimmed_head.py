"""A model file whose MTP head is over a part of the vocabulary drafts as with a draft head that is
given the same rows; the text is that of plain decoding.

Logits and tokens are compared to the byte: the same kernels see the same rows of the same number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import Model, Sampling, Session
from pyllama_mtp.drafting.head import draft_head, use_trimmed_head
from pyllama_mtp.drafting.vocabulary import save
from pyllama_mtp.errors import ModelFileError, UsageError
from pyllama_mtp.llama.batch import Ints
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.drafts import compute_drafts, draft_logits
from pyllama_mtp.models.ggufinfo import read_gguf
from pyllama_mtp.models.modelinfo import GGUFInfo
from pyllama_mtp.models.synth import write_synthetic
from pyllama_mtp.models.tokenizer import read_tokenizer

from ..marks import usual
from ..models.test_trimmed_head import MALFORMED
from ..processes import RunPython
from ..trimmed import head_rows, rewrite, tensors_of, write_trimmed
from .draftheads import (
    NEWEST,
    context,
    drafted,
    generated,
    logits_of,
    set_head,
    tokens_of,
    unset_head,
)
from .support import computed_by, draft_ids, made_up, scaled, settings
from .twocontexts import context as context_of
from .twocontexts import every

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make(source, ids, dtype=..., **options): a trimmed file."""
    folder = tmp_path_factory.mktemp("trimmed")

    def write(source: Path, ids: Ints, dtype: type[np.generic] = np.int64, **options: bool) -> Path:
        target = folder / f"{len(list(folder.iterdir()))}.gguf"
        return write_trimmed(source, target, ids, ids.astype(dtype), **options)

    return write


@pytest.fixture(scope="module")
def vocab(demo_file: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ranking of two tokens of three, so that hardly a row has its token's number."""
    tokenizer = read_tokenizer(demo_file)
    some = np.delete(np.arange(tokenizer.n_vocab, dtype=np.int32), slice(0, None, 3))
    path = tmp_path_factory.mktemp("vocab") / "ranking.json"
    save(path, some, tokenizer, "made here")
    return str(path)


@pytest.fixture(scope="module")
def ids(demo: Model, vocab: str) -> Ints:
    head = draft_head(demo.info, vocab)
    assert head and len(head.ids) > 1300 and (head.ids != np.arange(len(head.ids))).mean() > 0.9
    return head.ids


@pytest.fixture(scope="module")
def trimmed(make: Make, demo_file: Path, ids: Ints) -> Iterator[Model]:
    with Model(make(demo_file, ids)) as model:
        yield model


def candidates_of(draft: Context, n: int) -> list[list[float]]:
    """Logits of the best tokens of some drafts."""
    found = []
    for (newest,) in NEWEST["some"]:
        compute_drafts(
            draft, np.array([newest], np.int32), np.zeros(1, np.int32), 1, n_candidates=n
        )
        found.append(sorted(draft_logits(draft)[0, 0].tolist()))
    return found


# -- logits, tokens, candidates --------------------------------------------------------------------

#: Shape, type of the matrices, type of d2t, whether its ids are in order.
FILES = [
    ("tiny", "f16", np.int64, False),
    ("tiny", "f16", np.int32, True),
    ("tiny-moe", "f16", np.int64, True),
    ("tiny-moe", "q8_0", np.int32, False),
]


@pytest.mark.parametrize(("shape", "kind", "dtype", "in_order"), FILES)
def test_the_same_as_a_head_that_is_set_head(
    make: Make, tmp_path: Path, shape: str, kind: str, dtype: type[np.generic], in_order: bool
) -> None:
    """Every logit; ids in the order of the file."""
    whole_file = write_synthetic(tmp_path / "whole.gguf", shape, kind, n_vocab=2055)
    ids = np.sort(np.random.default_rng(1).choice(2055, 37, replace=False)).astype(np.int32)
    order = np.arange(37) if in_order else np.random.default_rng(2).permutation(37)
    part_file = make(whole_file, ids[order], dtype)
    with (
        Model(whole_file) as whole,
        Model(part_file) as part,
        context(whole) as wanted,
        context(part) as found,
    ):
        set_head(wanted, ids)
        use_trimmed_head(found)
        assert found.draft_ids is not None and found.draft_ids.tolist() == ids[order].tolist()
        logits = logits_of(wanted)[:, order]
        assert logits_of(found).tobytes() == np.ascontiguousarray(logits).tobytes()
        best = tokens_of(wanted, True)
        assert tokens_of(found, True) == tokens_of(found, False) == best
        assert candidates_of(found, 5) == candidates_of(wanted, 5)
        assert len(candidates_of(found, 99)[0]) == 37


def test_for_who_does_not_know_of_it(trimmed: Model, demo: Model, ids: Ints) -> None:
    """Logits of the whole vocabulary, as upstream's drafting programs read them."""
    with context(demo) as wanted, context(trimmed) as found:
        set_head(wanted, ids)
        logits = logits_of(found)
        assert logits.shape[1] == demo.n_vocab
        assert logits[:, ids].tobytes() == logits_of(wanted).tobytes()
        others = np.delete(np.arange(demo.n_vocab), ids)
        assert np.isneginf(logits[:, others]).all()
        assert tokens_of(found, True) == tokens_of(found, False) == tokens_of(wanted, True)
        assert candidates_of(found, 7) == candidates_of(wanted, 7)
        chains = [drafted(one, [7, 100, 1999], False, 5).tolist() for one in (found, wanted)]
        assert chains[0] == chains[1]


def test_one_head_after_another(trimmed: Model, demo: Model, ids: Ints) -> None:
    """The file's, one that is given, and what the context began with."""
    others = np.arange(3, 700, 5, dtype=np.int32)
    with context(demo) as wanted, context(trimmed) as found:
        at_first = logits_of(found)
        for _ in range(2):
            set_head(wanted, others)
            set_head(found, others)
            assert logits_of(found).tobytes() == logits_of(wanted).tobytes()
            set_head(wanted, ids)
            use_trimmed_head(found)
            assert logits_of(found).tobytes() == logits_of(wanted).tobytes()
        unset_head(found)
        assert logits_of(found).tobytes() == at_first.tobytes()


def test_nothing_is_copied(trimmed: Model, demo: Model, ids: Ints) -> None:
    """Weights: the rows and their ids as in the file, and ids for the graphs. Contexts: nothing."""
    rows = head_rows(demo.info, ids).data.nbytes
    with context(demo) as whole, context(trimmed) as found:
        before = found.memory()
        grown = before["model"] - whole.memory()["model"]
        assert rows + (8 + 4) * len(ids) <= grown <= rows + 12 * len(ids) + 4096
        use_trimmed_head(found)
        assert found.memory()["context"] == before["context"] == whole.memory()["context"]


# -- generation ------------------------------------------------------------------------------------


def drafting(
    model: Model, prompts: Sequence[Sequence[int]], seen: list[int], **options: Any
) -> tuple[list[list[int]], list[int]]:
    """Tokens after each prompt, and all drafts."""
    seen.clear()
    return [run.tokens for run in generated(model, prompts, **options)], seen.copy()


DRAWN = {"draft_sampling": True, "sampling": Sampling(temperature=0.8, seed=5)}


@pytest.mark.parametrize("options", usual({}, long=[DRAWN]))
def test_the_same_drafts(
    demo: Model,
    trimmed: Model,
    make: Make,
    demo_file: Path,
    prompts: list[list[int]],
    seen: list[int],
    ids: Ints,
    vocab: str,
    options: dict[str, Any],
) -> None:
    """As with a draft head over the same tokens, one by one, whatever the order of d2t; and the
    same tokens, which at temperature 0 are those of plain decoding."""
    prompts = prompts[::3]
    wanted = drafting(demo, prompts, seen, draft_vocab=vocab, **options)
    assert len(wanted[1]) > 20
    assert drafting(trimmed, prompts, seen, **options) == wanted
    if not options:
        with Session(trimmed, settings(3)) as session:
            assert draft_ids(session).tolist() == ids.tolist(), "by the library, without a copy"
        plain, none = drafting(demo, prompts, seen, depth=0)
        assert wanted[0] == plain and not none
        order = np.random.default_rng(4).permutation(len(ids))
        with Model(make(demo_file, ids[order])) as other:
            assert drafting(other, prompts, seen) == wanted


def test_other_tokens_than_the_files(
    demo: Model, trimmed: Model, prompts: list[list[int]], seen: list[int]
) -> None:
    """Rows of the model's own LM head; for the whole vocabulary there is no head."""
    wanted = drafting(demo, prompts[:3], seen, draft_vocab=512)
    assert drafting(trimmed, prompts[:3], seen, draft_vocab=512) == wanted
    for every_token in ("full", 4096):
        with pytest.raises(
            UsageError, match=r"\d+ of 2048 tokens and is used as it is; use 'auto'"
        ):
            Session(trimmed, settings(3, draft_vocab=every_token))


def test_without_the_head(demo: Model, trimmed: Model, prompts: list[list[int]]) -> None:
    with Model(trimmed.path, mtp=False) as model:
        assert not model.has_mtp
        found, plain = (generated(one, prompts[:2], depth=0) for one in (model, demo))
    assert [run.tokens for run in found] == [run.tokens for run in plain]


# -- refusals --------------------------------------------------------------------------------------


def test_where_there_is_no_trimmed_head(demo: Model, trimmed: Model) -> None:
    """A whole one, and a target that does not draft."""
    with context(demo) as whole, context_of(trimmed, with_mtp=False) as target:
        for found in (whole, target):
            with pytest.raises(UsageError, match=r"not possible here: .*of a file that has"):
                use_trimmed_head(found)
            assert found.draft_ids is None


BYPASS = """
import pyllama_mtp.llama.model as module
from pyllama_mtp.errors import ModelFileError
from pyllama_mtp.models.ggufinfo import read_gguf
module.validate_model_file = lambda path, *more: read_gguf(path)
found = []
for path in sys.argv[1:]:
    try:
        module.Model(path).close()
        found.append("loaded")
    except ModelFileError as error:
        found.append(str(error))
"""


def test_the_library_refuses_by_itself(run_python: RunPython, tmp_path: Path) -> None:
    """Malformed files are refused, not aborted over. In a process of its own for that reason."""
    whole = write_synthetic(tmp_path / "whole.gguf", "tiny", "f16")
    paths = [
        write_trimmed(whole, tmp_path / f"{i}.gguf", *malformed[:2])
        for i, malformed in enumerate(MALFORMED.values())
    ]
    found = computed_by("patched", run_python, BYPASS, *paths)
    for said, name in zip(found, MALFORMED, strict=True):
        assert re.search("llama.cpp cannot load it: .*(d2t|wrong shape|no such head)", said), name


# -- files of nothing but the head -----------------------------------------------------------------


def unchecked(path: str | Path, require_mtp: bool = True, head: str | None = None) -> GGUFInfo:
    return read_gguf(path)


def test_a_file_without_a_trunk(
    make: Make,
    demo: Model,
    demo_file: Path,
    ids: Ints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its only LM head is the trimmed one. The driver has no use for such files; the library does,
    for programs that load the head beside its model."""
    path = make(demo_file, ids, sidecar=True)
    with pytest.raises(ModelFileError, match="MTP head alone"):
        Model(path)
    monkeypatch.setattr("pyllama_mtp.llama.model.validate_model_file", unchecked)
    options = {"with_mtp": False, "mtp_head": True}
    n, logits = 12, []
    hidden = np.random.default_rng(0).standard_normal((n, demo.n_embd)).astype(np.float32)
    with Model(path) as head:
        for model in (head, demo):
            with context_of(model, **options) as block:
                block.decode(made_up(model, n), 0, every(n), hidden)
                logits.append(np.stack([block.logits(row) for row in range(n)]))
    size = np.abs(logits[1]).max()
    np.testing.assert_allclose(
        logits[0][:, ids], logits[1][:, ids], rtol=0, atol=scaled(1e-5) * size
    )
    assert np.isneginf(np.delete(logits[0], ids, axis=1)).all()


def test_a_trimmed_output_beside_a_trunk(
    make: Make, moe_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The trunk could not run with it: refused by both."""
    tensors = tensors_of(write_trimmed(moe_file, tmp_path / "d2t.gguf", None, np.arange(5)))
    head, dtype = tensors["output.weight"]
    path = rewrite(moe_file, tmp_path / "m.gguf", {**tensors, "output.weight": (head[:5], dtype)})
    with pytest.raises(ModelFileError, match=r"output\.weight"):
        Model(path)
    monkeypatch.setattr("pyllama_mtp.llama.model.validate_model_file", unchecked)
    with pytest.raises(ModelFileError, match="the file has no such head"):
        Model(path)
