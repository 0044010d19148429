"""What this package can do with each architecture of an MTP head, at the pin of llama.cpp.

Where everything applies, the head lives in the trunk's context (:mod:`..drafting.drafter`). The
others draft in upstream's way, the head in a context of its own (:mod:`..drafting.upstream`);
patches that no architecture has to know of apply to them, too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """What can be done with models of an architecture.

    Attributes:
        models: that are published, for people.
        in_trunk: the head is in the trunk's context: its K and V only for a prompt, all drafts in
            one graph. False: upstream's way, for reasons that are in docs/models.md.
        validated: files are checked in depth, so that none ends the process.
        several_heads: the graph takes one of several MTP blocks; block k drafts the k-th token, so
            that a round has no more drafts than blocks. False: exactly one block, for all drafts.
        hidden: what the first draft is given of the trunk: "post-norm" (after the final norm),
            "pre-norm", or "streams": all residual streams, side by side.
        rollback: how rejected drafts leave the caches: "cut" (attention only), "snapshot" (of the
            recurrent state, after each token) or "pending" (what tokens do to the state waits).
        own: what a block may have of its own in the place of the trunk's: the embedding, the LM
            head, the final norm.
    """

    models: str
    in_trunk: bool = False
    validated: bool = False
    several_heads: bool = False
    hidden: str = "post-norm"
    rollback: str = "cut"
    own: tuple[str, ...] = ("embed_tokens", "shared_head_head", "shared_head_norm")


#: By ``general.architecture``: all whose MTP graph is in the pin.
ARCHITECTURES = {
    "qwen35": Architecture("Qwen3.5, 3.6, 3.8", in_trunk=True, validated=True, rollback="pending"),
    "qwen35moe": Architecture(
        "Qwen3.5, 3.6 with experts", in_trunk=True, validated=True, rollback="pending"
    ),
    "qwen3next": Architecture("Qwen3-Next", in_trunk=True, rollback="pending"),
    "bailingmoe3": Architecture("Ling 3.0", rollback="snapshot", own=()),
    "cohere2moe": Architecture("Command with experts"),
    "deepseek2": Architecture("GLM-4.7-Flash"),
    "deepseek32": Architecture("DeepSeek-V3.2"),
    "deepseek4": Architecture("DeepSeek-V4", hidden="streams", rollback="snapshot"),
    "glm-dsa": Architecture("GLM-5"),
    "glm4moe": Architecture("GLM-4.5, 4.6, 4.7"),
    "glm5-next": Architecture("GLM-5.3-Flash", rollback="snapshot"),
    "hy_v3": Architecture("Hunyuan 3", several_heads=True),
    "mimo2": Architecture("MiMo-V2", several_heads=True, hidden="pre-norm"),
    "nemotron_h_moe": Architecture("Nemotron 3", rollback="snapshot", own=("shared_head_norm",)),
    "qwen4exp": Architecture("Qwen3.8-Flash-Next", hidden="streams", rollback="snapshot", own=()),
    "step35": Architecture("Step-3.5", several_heads=True, hidden="pre-norm"),
}
#: Those whose operators all round a token in one way, whatever is computed with it, as random walks
#: show (tests/regression/test_random_walks.py); see :attr:`.Model.same_bits`.
SAME_BITS = ("gemma3", "llama", "qwen3", "qwen35", "qwen35moe", "qwen3next")
#: Those whose MTP head llama.cpp loads and has no graph for at the pin.
NEVER_DRAFTED = ("bailingmoe2", "dots3note", "exaone4", "exaone-moe", "glm4")

#: Those that llama.cpp loads and that do not continue text: what they are instead.
NOT_TEXT = {
    **dict.fromkeys(
        (
            *("bert", "eurobert", "gemma-embedding", "gemma-embedding2", "jina-bert-v2"),
            *("jina-bert-v3", "llama-embed", "modern-bert", "neo-bert", "nomic-bert"),
            *("nomic-bert-moe", "t5encoder"),
        ),
        "an embedding model",
    ),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), "a diffusion model"),
    **dict.fromkeys(("dflash", "eagle3"), "a draft model for another one"),
    **dict.fromkeys(("pockettts", "qwen3tts", "wavtokenizer-dec"), "a model of speech"),
    "clef": "a model that chooses among given answers",
    "clip": "the vision or audio part of a model (mmproj)",
    "gemma4-assistant": "an MTP head for a Gemma 4 model",
    "t5": "a model with an encoder",
}

#: What our patches do for drafting, and why not for a head in a context of its own; "" where they
#: do that, too.
PATCHES = {
    "only K and V of the head for prompts": "upstream's graph of a block computes all of it",
    "all drafts of a round in one graph": "upstream's graph of a block is one step, for a batch",
    "the final norm for output rows only": (
        "the head is given the normed rows of all tokens; before the norm upstream has it so"
    ),
    "draft vocabulary": "",
    "best tokens and candidates picked in the graph": "",
    "products and attention of a few rows": "",
}
_ROLLBACK = {
    "cut": "their cells are dropped",
    "snapshot": "back to a snapshot of the state",
    "pending": "the next pass takes in what stays",
}


def used(one: Architecture) -> tuple[list[str], list[str]]:
    """The names of PATCHES that apply to an architecture, and the others."""
    apply = [name for name, why_not in PATCHES.items() if one.in_trunk or not why_not]
    return apply, [name for name in PATCHES if name not in apply]


def table() -> str:
    """What can be done with each architecture, in Markdown, for docs/models.md."""
    lines = [
        ("architecture", "models", "the head is", "blocks", "it is given", "rejected drafts"),
        ("---",) * 6,
    ]
    for name, one in ARCHITECTURES.items():
        where = "in the trunk's context" if one.in_trunk else "in a context of its own"
        blocks = "1, or one per draft" if one.several_heads else "1"
        lines += [(f"`{name}`", one.models, where, blocks, one.hidden, _ROLLBACK[one.rollback])]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    patches: list[tuple[str, ...]] = [
        ("what our patches do", "in the trunk's context", "in a context of its own"),
        ("---",) * 3,
    ]
    patches += [(p, "yes", f"no: {why}" if why else "yes") for p, why in PATCHES.items()]
    return rows + "\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in patches)


def elsewhere(architecture: str) -> str:
    """What drafts with the MTP head of an architecture that is not driven here, as a sentence."""
    if architecture == "gemma4-assistant":
        return (
            "it has no keys and values of its own, it reads those of the last layers of a Gemma 4 "
            "model, and that is not driven here: the model runs without it. With it llama.cpp's "
            "own server drafts: llama-server -m MODEL -md FILE --spec-type draft-mtp"
        )
    if architecture in NEVER_DRAFTED:
        return "llama.cpp has no graph for its MTP head"
    return "no MTP head of it is known"
