"""Train streams for a model on this machine: ``python -m mlx_specstream.train --data … --out …``.

    python -m mlx_specstream.train distill --prompts prompts.jsonl --out corpus.npz
    python -m mlx_specstream.train --data corpus.npz --out my-streams --minutes 30

``--data`` is a corpus of prompts with the model's own answers: a ``.npz`` that this project wrote,
or JSONL with ``prompt`` and ``answer`` (``.gz`` too). The trunk's states are computed once and kept
(``--cache``); a run that was stopped goes on when the same command is given again.
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

from . import embedded, loading, options, train_distill
from .errors import SpecStreamError, command
from .streams import StreamsConfig, make_streams
from .streams.config import METHODS, MODES
from .streams.files import identify, tokenizer_hash
from .streams.folder import save_table
from .streams.ngram_table import NgramTable
from .target import Target
from .train_progress import progress_bar
from .training import trainer as training
from .training.corpus import Corpus, answers, from_answers
from .training.trunk import TrunkCache

TIMED_STEPS = 4  # to find out how many steps fit the minutes


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = options.Parser(
        prog="python -m mlx_specstream.train",
        description="Train streams for a model, on its own answers, on this machine.",
    )
    plan, config = training.Plan(), StreamsConfig()
    parser.add_argument("--data", required=True, type=Path, help="corpus: .npz, or JSONL")
    parser.add_argument("--out", required=True, type=Path, help="streams folder to write")
    parser.add_argument(
        "--cut-at",
        type=options.positive,
        metavar="N",
        help="answers in JSONL of this many tokens were cut there (default: none was)",
    )
    parser.add_argument("--cache", type=Path, help="folder of the trunk's states")
    parser.add_argument("--minutes", type=float, default=60.0, help="of training (default: 60)")
    parser.add_argument("--steps", type=options.positive, help="steps, in place of minutes")
    parser.add_argument("--method", choices=METHODS, default=config.method)
    parser.add_argument("--mode", choices=MODES, default=config.mode)
    numbers = {
        "gamma": (config.gamma, "streams"),
        "layers": (config.layers, "top layers that attention streams pass"),
        "rank": (config.rank, "rank of the adapters"),
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
    parser.add_argument("--table-only", action="store_true", help="count the table, train nothing")
    parser.add_argument("--learning-rate", type=float, help="at its highest (default: 1e-3)")
    parser.add_argument("--train-seed", type=int, default=plan.seed, help="of the choice of texts")
    options.add_model_options(parser)
    return parser.parse_args()


def read_corpus(args: argparse.Namespace, tokenizer: Any) -> Corpus:
    """The corpus, checked against the tokenizer.

    Raises:
        SpecStreamError: If it cannot be read or was made with another tokenizer.
    """
    ours = tokenizer_hash(tokenizer)
    if args.data.suffix != ".npz":
        return from_answers(args.data, tokenizer, ours, args.cut_at)
    corpus = Corpus.load(args.data)
    if corpus.tokenizer != ours:
        raise SpecStreamError(f"{args.data} was made with another tokenizer than the model's")
    return corpus


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
    table = NgramTable.build(answers(corpus), target.vocab_size, args.table_depth)
    save_table(args.out, table, target.vocab_size, corpus.tokenizer)


def steps_for(trainer: training.Trainer, minutes: float) -> int:
    """How many steps fit into some minutes, by a few timed steps that are then undone."""
    before = tree_map(mx.array, trainer.heads.parameters())
    times = []
    for _ in range(TIMED_STEPS):
        began = time.perf_counter()
        trainer.step()
        times.append(time.perf_counter() - began)
    trainer.heads.update(before)
    return max(int(60 * minutes / (sum(times[1:]) / (TIMED_STEPS - 1))), 1)


@command
def main() -> None:
    """Train, or distil, as the command line says."""
    if sys.argv[1:2] == ["distill"]:
        train_distill.main(sys.argv[2:])
        return
    args = arguments()
    console = Console(stderr=True, highlight=False)
    model, tokenizer = options.load_from(args)
    target = Target.of(model)
    corpus = read_corpus(args, tokenizer)
    console.print(
        f"{loading.description(model)}\n{len(corpus)} texts, {corpus.answer_tokens} answer tokens"
    )
    if args.table_only:
        write_table(corpus, target, args)
        console.print(f"wrote {args.out}")
        return
    layers = args.layers if args.method == "attention" else 0
    cache = args.cache or embedded.cache_dir() / "trunk"
    trunk = TrunkCache(cache, target, corpus, layers)
    build_trunk(trunk, console)

    config = StreamsConfig(
        method=args.method,
        gamma=args.gamma,
        mode=args.mode,
        layers=args.layers,
        rank=args.rank,
        correction_rank=args.correction_rank,
        draft_vocab=training.draft_vocabulary(corpus, args.draft_vocab),
    )
    plan = training.Plan(
        steps=args.steps or 1,
        texts=args.texts,
        accumulate=args.accumulate,
        anchors=args.anchors,
        learning_rate=args.learning_rate or training.Plan.learning_rate,
        validate_every=args.validate_every,
        held_out=args.held_out,
        seed=args.train_seed,
    )
    identity = identify(target, tokenizer, loading.description(model).partition(" · ")[0])

    def trainer_for(steps: int) -> training.Trainer:
        heads = make_streams(config, target)
        return training.Trainer(heads, trunk, replace(plan, steps=steps), args.out, identity)

    steps = args.steps
    if steps is None:
        steps = training.planned_steps(args.out) or steps_for(trainer_for(1 << 30), args.minutes)
    trainer = trainer_for(steps)
    if trainer.resume():
        console.print(f"going on from step {trainer.progress.step} of {steps}")
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
    write_table(corpus, target, args)
    console.print(
        f"wrote {args.out}: {trainer.progress.best:.2f} tokens per pass expected of a top-4 tree"
    )


if __name__ == "__main__":
    main()
