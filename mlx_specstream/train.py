"""Train streams for a model on this machine: ``python -m mlx_specstream.train``.

    python -m mlx_specstream.train --prompts chats.jsonl --out my-streams --minutes 60

One command: the model answers the prompts, what its trunk says of the answers is computed once,
the streams are trained on that and an n-gram table is counted. ``--data`` takes corpora instead
of prompts: ``.npz`` files of this project (``train distill`` writes them), or JSONL with
``prompt`` and ``answer``. A run that was stopped goes on when the same command is given again.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from rich.console import Console

from . import embedded, loading, options, train_distill, train_report
from .errors import command
from .self_test import add_self_test
from .streams import StreamHeads, StreamsConfig, make_streams
from .streams.attention import MultiStreamAttention
from .streams.config import METHODS, MODES
from .streams.files import identify, load_streams
from .streams.folder import save_table
from .streams.ngram_table import NgramTable
from .target import Target
from .train_data import answered, read_corpora
from .train_progress import progress_bar
from .training.checkpoint import planned_steps
from .training.corpus import Corpus, answers
from .training.distill import read_prompts
from .training.memory import training_memory
from .training.plan import Plan, draft_vocabulary
from .training.start import fit_starts
from .training.trainer import Trainer
from .training.trunk import TrunkCache

TIMED_STEPS = 4  # to find out how many steps fit the minutes
DISTIL_SHARE = 0.4  # of the minutes, at most, for the answers
START_TEXTS = 256  # enough for least squares


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = options.Parser(
        prog="python -m mlx_specstream.train",
        description="Train streams for a model, on its own answers, on this machine.",
    )
    plan, config = Plan(), StreamsConfig()
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", nargs="+", type=Path, help="corpora: .npz, or JSONL")
    source.add_argument("--prompts", type=Path, help="prompts that the model is to answer first")
    parser.add_argument("--out", required=True, type=Path, help="streams folder to write")
    parser.add_argument(
        "--temps", default="0,0.7", help="temperatures to answer prompts at (default: 0,0.7)"
    )
    parser.add_argument("--max-tokens", type=options.positive, default=192, help="of an answer")
    parser.add_argument(
        "--cut-at",
        type=options.positive,
        metavar="N",
        help="answers in JSONL of this many tokens were cut there (default: none was)",
    )
    parser.add_argument("--cache", type=Path, help="folder of the trunk's states")
    parser.add_argument(
        "--no-cache", action="store_true", help="compute the trunk's states whenever they are read"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="for all of it, roughly (default: 60)"
    )
    parser.add_argument("--steps", type=options.positive, help="steps, in place of minutes")
    parser.add_argument("--method", choices=METHODS, default=config.method)
    parser.add_argument("--mode", choices=MODES, default="deferred")
    parser.add_argument("--from", dest="trained", type=Path, help="streams folder to go on from")
    parser.add_argument(
        "--layers",
        type=options.positive,
        help="top layers that attention streams pass (default: a fifth of them)",
    )
    numbers = {
        "gamma": (config.gamma, "streams"),
        "rank": (config.rank, "rank of the adapters"),
        "start-rank": (config.start_rank, "rank of the map to where streams start"),
        "correction-rank": (config.correction_rank, "rank of the token-conditioned correction"),
        "draft-vocab": (8192, "tokens that streams may propose: the most frequent"),
        "texts": (plan.texts, "texts computed together"),
        "accumulate": (plan.accumulate, "how often that is done in a step"),
        "anchors": (plan.anchors, "positions of each text"),
        "held-out": (plan.held_out, "texts to validate with"),
        "validate-every": (plan.validate_every, "steps between validations"),
    }
    for name, (default, text) in numbers.items():
        parser.add_argument(
            f"--{name}", type=options.positive, default=default, help=f"{text} ({default})"
        )
    parser.add_argument(
        "--table-depth", type=options.positive, default=4, help="tokens of the table's chains (4)"
    )
    parser.add_argument(
        "--table-megabytes",
        type=float,
        metavar="MB",
        help="largest size of the table; the rarest contexts are left out (default: no limit)",
    )
    parser.add_argument("--table-only", action="store_true", help="count the table, train nothing")
    parser.add_argument("--learning-rate", type=float, help="at its highest (default: 1e-3)")
    parser.add_argument(
        "--soft",
        type=float,
        default=plan.soft,
        help=f"share of the model's own distribution in the labels, 0 to 1 ({plan.soft})",
    )
    parser.add_argument("--train-seed", type=int, default=plan.seed, help="of the choice of texts")
    options.add_model_options(parser)
    return parser.parse_args()


def corpus_for(
    args: argparse.Namespace, model: Any, tokenizer: Any, console: Console, until: float
) -> Corpus:
    """The corpora, or the model's answers to the prompts: those of an earlier run if it got there.

    Raises:
        SpecStreamError: If there is nothing usable.
    """
    if args.data:
        return read_corpora(args.data, tokenizer, args.cut_at)
    place = args.out / "corpus.npz"
    if place.exists():
        return read_corpora([place], tokenizer, None)
    tasks = read_prompts(args.prompts, train_distill.temperatures(args.temps))
    return answered(
        model, tokenizer, tasks, place, console, args.max_tokens, 32, args.train_seed, until
    )


def streams_to_train(args: argparse.Namespace, target: Target, corpus: Corpus) -> StreamHeads:
    """New streams as the command line says, or those of a folder.

    Raises:
        SpecStreamError: If they do not fit the target.
    """
    if args.trained:
        trained = load_streams(args.trained, target)
        known = trained.config.draft_vocab or ()
        ids = draft_vocabulary(corpus, args.draft_vocab, known)
        # No parameter belongs to a token, so the draft vocabulary may change.
        streams = make_streams(replace(trained.config, draft_vocab=ids), target)
        streams.update(tree_map(lambda value: value.astype(mx.float32), trained.parameters()))
        return streams
    config = StreamsConfig(
        method=args.method,
        gamma=args.gamma,
        mode=args.mode,
        layers=args.layers or max(1, round(len(target.blocks) / 5)),
        rank=args.rank,
        start_rank=args.start_rank,
        correction_rank=args.correction_rank,
        draft_vocab=draft_vocabulary(corpus, args.draft_vocab),
    )
    return make_streams(config, target)


def build_trunk(trunk: TrunkCache, console: Console) -> None:
    """Compute what is missing of the trunk cache, with its size first and a bar."""
    missing = len(trunk.missing())
    if not missing:
        return
    console.print(
        f"trunk cache: {trunk.nbytes() / 1e9:.2f} GB in {trunk.folder}, "
        f"{missing} of {trunk.shards} shards to compute"
    )
    began = time.perf_counter()
    with progress_bar(console, "{task.fields[rate]} tokens/s") as bar:
        task = bar.add_task("trunk", total=None, rate="")

        def report(done: int, total: int) -> None:
            rate = f"{done / (time.perf_counter() - began):.0f}"
            bar.update(task, completed=done, total=total, rate=rate)

        trunk.build(report)


def write_table(corpus: Corpus, target: Target, args: argparse.Namespace) -> None:
    """Count the corpus's answers into the n-gram table that goes with the streams."""
    most = None if args.table_megabytes is None else int(1e6 * args.table_megabytes)
    table = NgramTable.build(answers(corpus), target.vocab_size, args.table_depth, most)
    save_table(args.out, table, target.vocab_size, corpus.tokenizer)


def steps_for(trainer: Trainer, seconds: float) -> int:
    """How many steps fit into some seconds, by a few timed steps, which spoil the streams."""
    times = []
    for _ in range(TIMED_STEPS):
        began = time.perf_counter()
        trainer.step()
        times.append(time.perf_counter() - began)
    return max(int(seconds / (sum(times[1:]) / (TIMED_STEPS - 1))), 1)


@command
def main() -> None:
    """Train, or distil, as the command line says."""
    if sys.argv[1:2] == ["distill"]:
        train_distill.main(sys.argv[2:])
        return
    if sys.argv[1:2] == ["report"]:
        train_report.main(sys.argv[2:])
        return
    args = arguments()
    console = Console(stderr=True, highlight=False)
    end = time.perf_counter() + 60 * args.minutes
    model, tokenizer = options.load_from(args)
    target = Target.of(model)
    console.print(loading.description(model))
    until = end - 60 * args.minutes * (1 - DISTIL_SHARE)
    corpus = corpus_for(args, model, tokenizer, console, until)
    console.print(f"{len(corpus)} texts, {corpus.answer_tokens} answer tokens")
    if not args.table_only:
        train(args, model, tokenizer, corpus, console, end)
    write_table(corpus, target, args)
    console.print(f"wrote {args.out}")


def train(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    corpus: Corpus,
    console: Console,
    end: float,
) -> None:
    """Compute the trunk's states, train the streams, and measure them for their self-test."""
    target = Target.of(model)
    heads = streams_to_train(args, target, corpus)
    plan = Plan(
        steps=args.steps or 1,
        texts=args.texts,
        accumulate=args.accumulate,
        anchors=args.anchors,
        learning_rate=args.learning_rate or Plan.learning_rate,
        validate_every=args.validate_every,
        held_out=args.held_out,
        soft=args.soft,
        seed=args.train_seed,
    )
    cache = None if args.no_cache else args.cache or embedded.cache_dir() / "trunk"
    trunk = TrunkCache(cache, target, corpus, heads.config.trunk_layers)
    identity = identify(target, tokenizer, model._specstream_loaded.name)
    steps = args.steps or planned_steps(args.out)
    trainer = Trainer(heads, trunk, plan, args.out, identity)
    bound = training_memory(heads, plan, max(len(text.tokens) for text in corpus))
    console.print(f"training takes {bound.total / 1e9:.1f} GB at most")
    build_trunk(trunk, console)
    if steps is None:
        steps = steps_for(trainer, end - time.perf_counter())
        trainer = Trainer(streams_to_train(args, target, corpus), trunk, plan, args.out, identity)
    trainer.plan = replace(plan, steps=steps)
    if trainer.resume():
        console.print(f"going on from step {trainer.progress.step} of {steps}")
    elif isinstance(trainer.heads, MultiStreamAttention) and not args.trained:
        fit_starts(trainer.heads, trunk, trainer.train[:START_TEXTS])
    console.print(f"{steps} steps of {plan.accumulate} × {plan.texts} × {plan.anchors} anchors")
    with progress_bar(console, "{task.fields[loss]}") as bar:
        task = bar.add_task("training", total=steps, loss="")
        trainer.run(
            report=lambda p: bar.update(
                task,
                completed=p.step,
                loss=f"loss {p.loss:.3f} · {p.anchors / max(p.seconds, 1e-9):.0f} anchors/s · "
                f"{mx.get_peak_memory() / 1e9:.1f} GB",
            ),
            validated=lambda quality: console.print(f"step {trainer.progress.step}: {quality}"),
        )
    held_out = [corpus.texts[number] for number in trainer.valid]
    add_self_test(args.out, target, tokenizer, held_out)
    console.print(f"{trainer.progress.best:.2f} tokens per pass expected of a top-4 tree")


if __name__ == "__main__":
    main()
