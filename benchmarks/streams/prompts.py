"""Write prompts of many kinds, to distil a training corpus from.

    python benchmarks/streams/prompts.py --count 4000 --seed 1 --out prompts.jsonl

Everything in them is put together from the word lists in ``words.json``, so there is nothing of
the prompts in ``shared/prompts`` in them, and passages to summarize, question or translate are
invented. The kinds are those that people ask for; the words vary so that streams learn the kind
and not the prompt.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("words.json").read_text())


class Writer:
    """Puts prompts together, the same for the same seed."""

    def __init__(self, seed: int):
        self.chance = random.Random(seed)

    def one(self, kind: str) -> str:
        """One of a word list, or of words joined by semicolons."""
        return self.chance.choice(WORDS.get(kind) or kind.split(";"))

    def plan(self) -> str:
        """A passage about a plan."""
        number = self.chance.randint
        return " ".join(
            (
                f"In {self.one('places')}, {self.one('bodies')} wants to {self.one('plans')}, "
                f"because {self.one('reasons')}.",
                f"The work will cost {number(2, 90)} million dollars and take "
                f"{self.one('two;three;four;five')} years.",
                f"{self.one('About half;A third;Most;A quarter')} of the money comes from "
                f"{self.one('sources')}.",
                f"However, {self.one('critics')}.",
                f"A decision is expected in {self.one('March;May;July;October;December')}.",
            )
        )

    def study(self) -> str:
        """A passage about research."""
        what = self.one("studied").format(n=self.chance.randint(20, 900))
        return " ".join(
            (
                f"{self.one('scientists')} from {self.one('places')} spent "
                f"{self.one('two;three;four;six;ten')} years on {what}.",
                f"They found that {self.one('found')}.",
                f"At the same time {self.one('found')}, which nobody can explain so far.",
                f"The work was paid by {self.one('bodies')}.",
                f"Next they want to look at {self.one('topics')}, and to repeat the measurements "
                f"in {self.one('places')}.",
            )
        )

    def story(self) -> str:
        """A passage of everyday sentences."""
        return " ".join(self.sentence() for _ in range(self.chance.randint(3, 6)))

    def sentence(self) -> str:
        """An everyday sentence."""
        if self.chance.random() < 0.3:
            return self.one("requests")
        joint = self.chance.choice(
            [".", f", and {self.one('subjects').lower()} {self.one('verbs')}."]
        )
        return f"{self.one('subjects')} {self.one('verbs')} {self.one('whens')}{joint}"

    def chat(self) -> str:
        return self.one("chat").format(t=self.one("topics"), u=self.one("topics"))

    def summary(self) -> str:
        passage = self.chance.choice([self.plan, self.study, self.plan, self.study, self.story])()
        if self.chance.random() < 0.3:
            passage += "\n\n" + self.chance.choice([self.plan, self.study, self.story])()
        return f"{self.one('passage_tasks')}\n\n{passage}"

    def qa(self) -> str:
        passage, questions = self.chance.choice(
            [(self.plan(), "questions_plan"), (self.study(), "questions_study")]
        )
        asked = self.chance.sample(WORDS[questions], self.chance.choice([1, 1, 2]))
        ask = " ".join(asked)
        form = self.chance.randrange(3)
        if form == 0:
            return f"Read the text and answer: {ask}\n\n{passage}"
        if form == 1:
            return f"{passage}\n\nQuestion: {ask[0].upper() + ask[1:]}"
        return f"Use the text to answer in a full sentence: {ask}\n\nText: {passage}"

    def code(self) -> str:
        return self.one("code").format(f=self.one("functions"), c=self.one("classes"))

    def edit(self) -> str:
        if self.chance.random() < 0.4:
            return self.one("text_edits").format(s=self.story())
        code = self.one("snippets")
        return f"{self.one('edits')}\n\n```\n{code}\n```"

    def structured(self) -> str:
        if self.chance.random() < 0.2:
            return (
                f"Write a SQL query that {self.one('query_goals')}. Tables: {self.one('tables')}."
            )
        return self.one("structured").format(
            n=self.one("three;four;five;six;eight;ten"), x=self.one("things"), f=self.one("fields")
        )

    def math(self) -> str:
        number, goods = self.chance.randint, self.one("goods")
        a, b, c = number(2, 12), number(3, 30), number(100, 400)
        return self.chance.choice(
            [
                f"I buy {b} {goods} at {a} dollars each and pay with {c} dollars. "
                "How much is left?",
                f"A box holds {b} {goods}. How many are in {a} boxes? Explain step by step.",
                f"{self.one('subjects')} had {c} {goods} and gave away {b}. How many remain?",
                f"What is {c} plus {b * 7}? Show the steps.",
                f"What is {b} times {a}? Explain step by step.",
                f"Divide {c} {goods} among {a} people. How many does each get, and what is left?",
                f"A train travels {b * 5} kilometres in {a} hours. What is its average speed?",
                f"List the first {self.one('ten;twelve;twenty')} multiples of {a}, one per line.",
                f"List the numbers from {b} to {b + number(8, 25)}, one per line.",
                f"List the first {self.one('ten;eight;twelve')} powers of {number(2, 5)}.",
                f"Write the multiplication table of {a} from 1 to {number(8, 12)}.",
                f"Solve for x: {a}x + {b} = {a * number(2, 20) + b}. Show each step.",
                f"A shirt costs {c} dollars and is reduced by {a * 5} percent. What is the price?",
                f"What is the area of a rectangle of {b} by {a} metres? Explain.",
                f"Count down from {b} to 1, separated by commas.",
            ]
        )

    def translate(self) -> str:
        sentences = " ".join(self.sentence() for _ in range(self.chance.choice([1, 1, 2, 3])))
        return self.one("translate").format(l=self.one("languages"), s=sentences)

    def phrase(self) -> str:
        """Everyday sentences to translate, of more kinds than ``translate`` has."""
        sentences = " ".join(self.remark() for _ in range(self.chance.choice([1, 1, 1, 2])))
        return self.one("phrase_tasks").format(l=self.one("tongues"), s=sentences)

    def remark(self) -> str:
        """A sentence of somebody who does something, or of a scene."""
        form = self.chance.randrange(5)
        if form == 0:
            return self.one("scenes")
        who, does = self.one("people"), self.one("doings")
        said = f"{who[0].upper()}{who[1:]} {does}"
        if form == 1:
            return f"{said} {self.one('moments')}."
        if form == 2:
            return f"{said}, but {self.one('people')} {self.one('doings')}."
        if form == 3:
            return f"{said} and {self.one('doings')}."
        return f"I heard that {who} {does} {self.one('moments')}."

    def foreign(self) -> str:
        """Something to write in another language."""
        return self.one("foreign_tasks").format(l=self.one("tongues"), t=self.one("topics"))

    def everything(self, count: int, kinds: dict[str, float]) -> list[dict[str, str]]:
        """``count`` prompts, none twice, the kinds in these shares."""
        makers: dict[str, Callable[[], str]] = {kind: getattr(self, kind) for kind in kinds}
        prompts: dict[str, str] = {}
        while len(prompts) < count:
            kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
            prompts.setdefault(makers[kind](), kind)
        return [{"category": kind, "prompt": prompt} for prompt, kind in prompts.items()]


SHARES = {
    "chat": 0.18,
    "summary": 0.14,
    "qa": 0.1,
    "code": 0.11,
    "edit": 0.11,
    "structured": 0.12,
    "math": 0.1,
    "translate": 0.14,
}


def shares(text: str) -> dict[str, float]:
    """``"phrase=3,foreign=1"`` as kinds and their shares."""
    pairs = (part.partition("=") for part in text.split(","))
    return {kind: float(share) for kind, _, share in pairs}


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", type=shares, default=SHARES, help="phrase=3,foreign=1")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    with open(args.out, "w", encoding="utf-8") as file:
        for row in Writer(args.seed).everything(args.count, args.kinds):
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
