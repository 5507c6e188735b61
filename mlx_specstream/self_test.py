"""The self-test of a streams folder: do the streams still predict a target with other weights?

Streams trained for one model fit every model of its shape, but may predict nothing of what a
fine-tune or another quantization writes. So a folder can carry a few prompts, and how many
tokens a pass made of them on the target that the streams were trained for. Where they are loaded
onto other weights, the same passes run there, and a warning gives both figures. The text is
right either way: this only ever informs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .decode.loop import Decoder
from .decode.plan import Branch, TreePlan
from .decode.planner import FixedPlanner
from .decode.processors import Sampling
from .decode.proposers import StreamProposer
from .errors import SpecStreamError
from .streams import StreamHeads
from .streams.files import OtherWeights, load_streams, save_self_test
from .streams.folder import StreamSet
from .target import Target

if TYPE_CHECKING:
    from .training.corpus import Text

# Prompts differ more than the tokens after one do: rather some more of them, and these short. It
# is about 100 passes, which somebody who loads the streams has to wait for.
PROMPTS = 6
PROMPT_TOKENS = 96  # most of a prompt
TOKENS = 24  # decoded after each prompt
# Most of anything that a self-test may ask for: a damaged one must not keep a user waiting.
MOST_PROMPTS, MOST_TOKENS = 16, 256


@dataclass(frozen=True)
class Acceptance:
    """What passes over chains of streams alone came to.

    Args:
        passes: Passes, the first after a prompt included, which has no proposals yet.
        proposed: Passes that had a proposal at each depth, ``gamma`` counts.
        accepted: How many of these the target accepted.
    """

    passes: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a pass committed: what it accepted, and the target's own next one."""
        return 1 + sum(self.accepted) / self.passes


def measure(
    target: Target,
    streams: StreamHeads,
    prompts: Iterable[Sequence[int]],
    tokens: int = TOKENS,
    stop: Collection[int] = (),
) -> Acceptance:
    """Continue prompts greedily, with the streams alone as a chain of all their depths.

    Args:
        target: The target.
        streams: Its streams.
        prompts: Token ids of each, at least one prompt of at least one token.
        tokens: To decode after each; the last pass is counted whole.
        stop: Ids of which the first ends a prompt's continuation (end of text).
    """
    gamma = streams.config.gamma
    planner = FixedPlanner(TreePlan((Branch.of_widths("streams", (1,) * gamma),)))
    decoder = Decoder(target, [StreamProposer(streams)])
    passes, proposed, accepted = 0, [0] * gamma, [0] * gamma
    for prompt in prompts:
        text, made = list(prompt), 0
        cache = target.make_cache()
        target.prefill(text[:-1], cache)
        for report in decoder.decode(text, cache, planner, Sampling(), seed=0):
            passes += 1
            made += len(report.tokens)
            for depth in range(report.proposed["streams"]):
                proposed[depth] += 1
            for depth in range(len(report.tokens) - 1):
                accepted[depth] += 1
            if made >= tokens or not set(stop).isdisjoint(report.tokens):
                break
    return Acceptance(passes, tuple(proposed), tuple(accepted))


def make_self_test(
    target: Target,
    streams: StreamHeads | StreamSet,
    texts: Iterable[Text],
    stop: Collection[int] = (),
) -> dict[str, Any]:
    """A self-test, measured on the target that the streams were trained for.

    Args:
        target: That target.
        streams: The streams.
        texts: Texts with prompts to take, best ones that were held out in training.
        stop: Ids that end a text.

    Returns:
        Ready for JSON: ``prompts``, lists of token ids; ``tokens`` to decode after each; ``stop``;
        and what was measured: ``passes``, ``tokens_per_pass``, and for each depth how many tokens
        were ``proposed`` and ``accepted``.

    Raises:
        SpecStreamError: If there are no streams or no prompts, or these hold ids that the target
            does not know.
    """
    heads = streams.heads if isinstance(streams, StreamSet) else streams
    if heads is None:
        raise SpecStreamError("there are no streams to make a self-test for, only a table")
    prompts = choose_prompts(texts, target)
    ends = sorted(int(token) for token in stop if 0 <= token < target.vocab_size)
    found = measure(target, heads, prompts, TOKENS, ends)
    return {
        "prompts": prompts,
        "tokens": TOKENS,
        "stop": ends,
        "passes": found.passes,
        "tokens_per_pass": found.tokens_per_pass,
        "proposed": list(found.proposed),
        "accepted": list(found.accepted),
    }


def choose_prompts(texts: Iterable[Text], target: Target) -> list[list[int]]:
    """Up to ``PROMPTS`` different prompts, evenly from all that are short enough.

    Only where these are too few, the ends of longer ones are taken too.

    Raises:
        SpecStreamError: If there is none, or one holds ids that the target does not know.
    """
    whole: dict[tuple[int, ...], None] = {}
    ends: dict[tuple[int, ...], None] = {}
    most = min(PROMPT_TOKENS, (target.context or 1 << 30) - TOKENS)
    for text in texts:
        ids = tuple(text.tokens[: text.answer].tolist())
        wrong = [token for token in ids if not 0 <= token < target.vocab_size]
        if wrong:
            raise SpecStreamError(
                f"a prompt has token {wrong[0]}, but the model's are 0 to {target.vocab_size - 1}: "
                "take texts that were made with its tokenizer"
            )
        if ids and most > 0:
            (whole if len(ids) <= most else ends)[ids[-most:]] = None
    found = list(whole if len(whole) >= PROMPTS else whole | ends)
    if not found:
        raise SpecStreamError("a self-test needs at least one text with a prompt")
    count = min(PROMPTS, len(found))
    return [list(found[number * len(found) // count]) for number in range(count)]


def add_self_test(
    folder: str | Path, target: Target, tokenizer: Any, texts: Iterable[Text]
) -> dict[str, Any]:
    """Measure a streams folder's self-test on its own target and write it into the folder.

    Args:
        folder: The streams folder; but for its ``config.json`` it stays as it is.
        target: The target that the streams were trained for.
        tokenizer: Its tokenizer.
        texts: As for ``make_self_test``.

    Returns:
        The self-test.

    Raises:
        SpecStreamError: If the folder or the texts cannot be used, the streams were trained for
            other weights, or the folder cannot be written; it is as it was then.
    """

    def refuse(found: OtherWeights) -> None:
        raise SpecStreamError(
            f"the streams in {found.folder} were trained for other weights: measure their "
            f"self-test on {found.made_for.name or 'the model they were trained for'}"
        )

    streams = load_streams(folder, target, tokenizer, refuse)
    made = make_self_test(target, streams, texts, tokenizer.eos_token_ids)
    save_self_test(folder, made)
    return made


def report_acceptance(found: OtherWeights) -> None:
    """Run the self-test of streams on other weights, and warn with both figures.

    A self-test that is missing or damaged is no reason to go without the streams, which it cannot
    make wrong: the warning says then that acceptance is unknown.
    """
    test, target = found.self_test, found.streams.target
    if test is None:
        found.warn()
        return
    fault = fault_of(test, target, found.streams.config.gamma)
    if fault:
        found.warn(
            "how many of their tokens are accepted here is unknown, "
            f"as the self-test in their config.json is damaged ({fault})"
        )
        return
    here = measure(target, found.streams, test["prompts"], test["tokens"], test["stop"])
    found.warn(
        f"{here.tokens_per_pass:.2f} tokens per pass here, "
        f"{test['tokens_per_pass']:.2f} on their own target"
    )


def fault_of(test: Any, target: Target, gamma: int) -> str:
    """What is wrong with a self-test read from a file; "" if it can be run on the target.

    All that is used is looked at: MLX reads out of bounds for ids beyond the vocabulary, and a
    figure that does not follow from the counts is none to warn with.
    """
    if not isinstance(test, dict):
        return "it is no object"
    prompts: Any = test.get("prompts")
    tokens: Any = test.get("tokens")
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= MOST_PROMPTS:
        return f"prompts is no list of 1 to {MOST_PROMPTS}"
    if not _counts([tokens], 1, MOST_TOKENS):
        return f"tokens is not 1 to {MOST_TOKENS}"
    last = target.vocab_size - 1
    for prompt in prompts:
        if not _counts(prompt, 0, last) or not 1 <= len(prompt) <= MOST_TOKENS:
            return f"a prompt is no list of 1 to {MOST_TOKENS} tokens from 0 to {last}"
        if target.context is not None and len(prompt) + tokens > target.context:
            return f"a prompt does not fit a context of {target.context}"
    if not _counts(test.get("stop"), 0, last):
        return f"stop is no list of tokens from 0 to {last}"
    passes: Any = test.get("passes")
    accepted: Any = test.get("accepted")
    own: Any = test.get("tokens_per_pass")
    if not _counts([passes], 1, MOST_PROMPTS * MOST_TOKENS):
        return "passes is no count"
    if not _counts(accepted, 0, passes) or len(accepted) != gamma:
        return f"accepted is no list of {gamma} counts"
    if type(own) not in (int, float) or not abs(own - 1 - sum(accepted) / passes) < 0.01:
        return "tokens_per_pass does not follow from passes and accepted"
    return ""


def _counts(values: Any, least: int, most: int) -> bool:
    """Whether it is a list of whole numbers (JSON's true is none) in a range."""
    if not isinstance(values, list):
        return False
    return all(type(value) is int and least <= value <= most for value in values)
