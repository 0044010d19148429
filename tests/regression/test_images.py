"""Prompts with images: the MTP head keeps what upstream's block keeps, drafts change no text, and
processed images are used again. The encoder has random weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import Answer, BatchSession, Model, Sampling, Session, Settings
from pyllama_mtp.errors import UsageError
from pyllama_mtp.images import Pixels
from pyllama_mtp.llama.batch import Batch
from pyllama_mtp.llama.vision import IMAGE_MARKER as HERE
from pyllama_mtp.llama.vision import Vision
from pyllama_mtp.models.mmproj import write_synthetic_mmproj

from ..marks import usual
from ..plain import write_model
from ..processes import RunPython
from .support import N_UBATCH, answers, made_up
from .test_random_walks import digits
from .twocontexts import context, none, one_sequence, state, trunk

#: By name: the text, and which images it shows.
PROMPTS = {
    "middle": (f"The girl looked at {HERE} and said", "a"),
    "first": (f"{HERE} In this picture there is", "b"),
    "last": (f"Once upon a time there was {HERE}", "c"),
    "several": (f"First {HERE} then {HERE} and again {HERE}. The", "aba"),
}


def picture(seed: int, height: int, width: int) -> Pixels:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


#: "b" has more tokens than a graph.
PICTURES = {"a": picture(1, 96, 160), "b": picture(2, 320, 256), "c": picture(3, 64, 256)}
SETTINGS = Settings(n_ctx=512, n_batch=64, n_ubatch=N_UBATCH, n_threads=1, ngram=False)


def of(name: str) -> tuple[str, list[Pixels]]:
    text, shown = PROMPTS[name]
    return text, [PICTURES[key] for key in shown]


def text_of(session: Session, name: str, n: int = 40) -> list[int]:
    text, images = of(name)
    return list(session.generate(text, images=images, max_tokens=n, ignore_eos=True).run().tokens)


def test_the_head_keeps_the_same_at_an_image(demo: Model, vision: Vision) -> None:
    """K and V of the head in the trunk's context, and the carry, are those of upstream's whole
    block, which is told of embeddings, positions and the hidden row before each."""
    prompt = vision.prompt(*of("first"))
    (placed,) = prompt.images
    image, n = placed.image, placed.image.n_tokens
    assert n > N_UBATCH and image.n_positions < n
    text = made_up(demo, 20)
    shown = np.zeros(n, np.int32), 7 + image.positions, np.zeros(n, np.int32), none(n)
    batches = [
        one_sequence(text[:7]),
        Batch(*shown, rows=image.rows),
        one_sequence(text[7:], start=7 + image.n_positions),
    ]
    options = {"n_ctx": 256, "n_batch": 128}
    with (
        context(demo, **options) as mine,
        trunk(demo, need_embd_pre_norm=True, **options) as target,
        context(demo, mtp_head=True, with_mtp=False, tap="outputs", **options) as block,
    ):
        before = np.zeros((1, demo.n_embd), np.float32)
        for batch in batches:
            if batch.rows is None:
                mine.decode_batch(batch)
                target.decode_batch(batch)
            else:
                for found in (mine, target):
                    found.decode_rows(batch.rows, batch.positions, 7 + image.n_positions)
            rows = target.hidden_rows().copy()
            paired = np.concatenate([before, rows[:-1]])
            block.decode_batch(dataclasses.replace(batch, hidden=paired))
            before = rows[-1:]
        own, whole = state(mine), state(block)
        assert own.positions.tolist() == whole.positions.tolist()
        assert len(np.unique(whole.k[0], axis=0)) == 20 + n, "the block cannot tell rows apart"
        assert own.k[-1].tobytes() == whole.k[0].tobytes()
        assert own.v[-1].tobytes() == whole.v[0].tobytes()
        assert own.carry.tobytes() == before.tobytes()


def test_drafts_change_no_text(demo: Model, vision: Vision) -> None:
    """At every depth, alone and with others, the text after images is that without drafts."""
    prompts: list[Any] = [vision.prompt(*of(name)) for name in PROMPTS]
    texts = set[str]()
    for depth, n_sequences in ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (2, 3)):
        chosen = dataclasses.replace(SETTINGS, draft_n_max=depth)
        got = answers(demo, prompts, chosen, 40, n_sequences, ignore_eos=True)
        texts.add(str([answer.tokens for answer in got]))
        assert depth == 0 or all(sum(answer.telemetry.accepted) for answer in got)
    assert len(texts) == 1 and len({str(answer.tokens) for answer in got}) == len(PROMPTS)


def test_a_batch_of_chats(demo: Model, vision: Vision) -> None:
    """Chats with images, together; the second one's beginning is a copy, as good as the first; the
    figures count all images."""
    parts = [{"type": "image", "image": PICTURES["a"]}, {"type": "text", "text": "What? " * 40}]
    asked = [{"role": "user", "content": parts}]
    with BatchSession(demo, SETTINGS, 2, vision=vision) as batch:
        found = batch.chat([asked, asked], max_tokens=8, sampling=Sampling()).run()
    assert [one.telemetry.n_image_tokens for one in found.results] == [15, 15]
    assert found.telemetry.n_image_tokens == 30
    assert found[0].telemetry.n_cached == 0 < found[1].telemetry.n_cached
    assert found[0].tokens == found[1].tokens


def test_too_much_is_refused_before_it_is_encoded(
    demo: Model, vision: Vision, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = picture(9, 1024, 1024)
    monkeypatch.setattr(vision, "_encode", lambda *_: pytest.fail("encoded"))
    with Session(demo, SETTINGS, vision=vision) as session:
        with pytest.raises(UsageError, match="and the context 512"):
            session.generate(HERE, images=[large])
        monkeypatch.setattr("pyllama_mtp.llama.vision.MOST_PIXELS", 2 * large.size // 3)
        with pytest.raises(UsageError, match="pixels together"):
            session.generate(HERE * 3, images=[large] * 3)


def test_close_waits_for_an_encoding(run_python: RunPython) -> None:
    done = run_python("""
import tempfile, threading
from pathlib import Path
import numpy as np
from pyllama_mtp import Model
from pyllama_mtp.llama.vision import IMAGE_MARKER, Vision
from pyllama_mtp.models.demo import demo_path
from pyllama_mtp.models.mmproj import write_synthetic_mmproj
with Model(demo_path()) as model, tempfile.TemporaryDirectory() as folder:
    vision = Vision(model, write_synthetic_mmproj(Path(folder, "mm.gguf"), model.n_embd_inp))
    began, found, encode = threading.Event(), [], vision._encode
    vision._encode = lambda *of: began.set() or encode(*of)
    def work():
        found.append(vision.prompt(IMAGE_MARKER, [np.zeros((1500, 1500, 3), np.uint8)]))
    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    vision.close()
    thread.join()
    print(len(found[0].images))
""")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_kept_images_take_so_many_bytes(
    demo: Model, vision: Vision, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = vision.prompt(HERE, [picture(20, 96, 96)]).images[0].image
    monkeypatch.setattr("pyllama_mtp.llama.vision.KEPT_BYTES", 2 * one.rows.nbytes)
    for seed in (21, 22, 20):
        prompt = vision.prompt(HERE, [picture(seed, 96, 96)])
    assert prompt.encode_s > 0, "it was dropped"
    assert vision.prompt(HERE, [picture(22, 96, 96)]).encode_s == 0


@pytest.mark.parametrize("arch", usual("llama", "mamba", long=["gemma3", "qwen3", "k2-horizon"]))
def test_other_architectures_see(at_once: None, arch: str, tmp_path: Path) -> None:
    """Models without M-RoPE take the rows one position after the other; drafts from the text, reuse
    and files work as after text."""
    texts, settings = [], dataclasses.replace(SETTINGS, ngram=True, n_ubatch=64)
    with Model(write_model(tmp_path / f"{arch}.gguf", arch)) as model:
        path = write_synthetic_mmproj(tmp_path / "mm.gguf", model.n_embd_inp)
        prompt = f"abc {HERE} abc {HERE} abc"
        images = [PICTURES["a"], PICTURES["b"]]
        with Vision(model, path, n_threads=1) as vision:
            shown = vision.prompt(prompt, images)
            for depth in (0, "auto"):
                chosen = dataclasses.replace(settings, draft_n_max=depth)
                with Session(model, chosen) as session:
                    got = session.generate(shown, max_tokens=24, ignore_eos=True).run()
                    texts.append(got.tokens)
                    session.save(tmp_path / "prompt")
                    session.restore(tmp_path / "prompt")
                    entries = [*shown.entries, *got.tokens, 5]
                    longer = session.generate(dataclasses.replace(shown, entries=entries)).run()
                    assert longer.telemetry.n_cached == len(entries) - 2
            with Session(model, settings, vision=vision) as session:
                other = session.generate(prompt, images=images[::-1], max_tokens=24).run().tokens
    assert texts[0] == texts[1] != other


def test_refusals(demo: Model, vision: Vision) -> None:
    """What cannot be done with images is said."""
    text, images = of("middle")
    with Session(demo, SETTINGS) as blind, pytest.raises(UsageError, match="need an encoder"):
        blind.generate(text, images=images)
    with Session(demo, SETTINGS, vision=vision) as session:
        with pytest.raises(UsageError, match=r"1 markers .* 2 images"):
            session.generate(text, images=images * 2)
        for wrong in ("a.png", images[0], None, Path("a.png")):
            with pytest.raises(UsageError, match="give a list of images"):
                session.generate(text, images=wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="not valid Unicode"):
            session.generate(f"{HERE} \ud800", images=images)
        with pytest.raises(UsageError, match="not taken here"):
            session.hidden_states(vision.prompt(text, images))  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="n_threads"):
            Vision(demo, vision.path, n_threads=1000)
    full = dataclasses.replace(SETTINGS, prompt_sync="full")
    with (
        Session(demo, full, vision=vision) as session,
        pytest.raises(UsageError, match="trunk's context"),
    ):
        session.generate(text, images=images)


@pytest.mark.parametrize("n_ubatch", usual(61, long=[N_UBATCH]))
def test_an_answer_has_the_digits_of_a_fresh_one(
    demo: Model, vision: Vision, tmp_path: Path, n_ubatch: int
) -> None:
    """With images, too, and with drafts, whatever was processed or restored from a file before: the
    prompt itself, one that it goes on, or one with other images, which ends before them."""

    def ask(session: Session) -> Answer:
        return session.generate(prompt, max_tokens=12, ignore_eos=True, logprobs=2).run()

    rng, file = np.random.default_rng(n_ubatch), tmp_path / "prompt"
    chosen = dataclasses.replace(SETTINGS, n_batch=512, n_ubatch=n_ubatch, draft_n_max=3)
    with Session(demo, chosen, vision=vision) as session:
        for step in range(16):
            text, images = of(str(rng.choice([*PROMPTS])))
            if others := rng.random() < 0.3:
                images = [picture(100 * step + i, 96, 96) for i in range(len(images))]
            prompt = vision.prompt(text + str(rng.choice(["", " And then"])), images)
            answer = ask(session)
            with Session(demo, dataclasses.replace(SETTINGS, draft_n_max=0)) as alone:
                assert digits(answer) == digits(ask(alone))
            assert not others or answer.telemetry.n_cached <= prompt.images[0].start
            if rng.random() < 0.3:
                session.save(file)
            elif file.exists() and rng.random() < 0.4:
                session.restore(file)
        end = prompt.images[-1].end
        session.reset()
        session.process(dataclasses.replace(prompt, entries=prompt.entries[: end + 1]))
        session.save(file)  # it ends with the image
        session.reset()
        assert session.restore(file) == end
        again = ask(session)
        assert digits(again) == digits(answer)
        assert again.telemetry.n_cached == end and again.telemetry.encode_s == 0
