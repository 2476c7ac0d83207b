"""Delegation without telling who one is: rewriter -> untrusted LM -> answerer.

The setting of PAPILLON (arXiv 2410.17127), as trained in mmGRPO (arXiv 2508.04660): a small LM of one's own rewrites
a request so that a large LM of somebody else can help without seeing personal details, and puts them back into the
answer. Requests, details and right answers are invented here, so that nobody has to judge them.
"""

import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

import dspy

from modpo.errors import ConfigError
from modpo.programs.invented import Names
from modpo.programs.judges import numeric
from modpo.programs.judges.fields import field_of
from modpo.programs.xml import XMLPredict
from modpo.task import Metric, Task

TRAIN, VAL, TEST, TRACES = 400, 64, 200, 96
SETTINGS = {"steps": 24, "warm_start": {"epochs": 3, "learning_rate": 3e-4, "batch_size": 8}}
_WINDOW = 4  # digits in a row that tell a number, such as an account's last four
_WHOLE = 6  # letters and digits from which on a detail is found through any spacing
_COMMON = frozenset({"and", "com", "example", "mail", "net", "org", "road", "street", "the"})
_DIGIT_RUN = re.compile(r"\d(?:[\s().\-/]*\d)*")


class Rewrite(dspy.Signature):
    """Ask the question without any personal detail."""

    request: str = dspy.InputField()
    query: str = dspy.OutputField()


class Help(dspy.Signature):
    """Answer the query."""

    query: str = dspy.InputField()
    reply: str = dspy.OutputField()


class Compose(dspy.Signature):
    """Answer the request with the reply."""

    request: str = dspy.InputField()
    reply: str = dspy.InputField()
    answer: str = dspy.OutputField()


class Delegate(dspy.Module):
    """Answer a request with the help of an LM that must not know who asks.

    Modules: `rewriter`, `untrusted`, `answerer`. The untrusted one is frozen by giving it an LM that is no policy:
    ``program.untrusted.set_lm(dspy.LM("openai/..."))``, after the policy has been set.

    Args:
        predictor: makes a module of a signature, such as `dspy.ChainOfThought`.
    """

    def __init__(self, predictor: Callable[[type[dspy.Signature]], dspy.Module] = XMLPredict) -> None:
        super().__init__()
        self.rewriter = predictor(Rewrite)
        self.untrusted = predictor(Help)
        self.answerer = predictor(Compose)

    def forward(self, request: str) -> dspy.Prediction:
        """Answer a request; the prediction has `query`, which is all that was given away, `reply` and `answer`."""
        query = self.rewriter(request=request).query
        reply = self.untrusted(query=query).reply
        return dspy.Prediction(query=query, reply=reply, answer=self.answerer(request=request, reply=reply).answer)


def quality_and_leakage(judge: Metric | None = None, weight: float = 1.0) -> Metric:
    """Make the metric: ``score = min(1, max(0, quality - weight * leakage))``.

    - quality is the mean of two: what `judge` says of the answer once all personal details are taken out of it, and
      the part of the details asked for that are in the answer whole (no matter how spaced or punctuated);
    - leakage is the part of the example's details of which the query tells the whole or a telling piece: see `leak`.

    PAPILLON's aggregate is ``(quality + 1 - leakage) / 2`` with an LM as the judge of quality: there an answer of no
    use earns one half if it leaks nothing, here nothing.

    Args:
        judge: of the example's `answer`, a metric of 0 .. 1; None for `numeric()`.
        weight: of leakage, 0 or more.

    Returns:
        A metric for examples with `answer`, `details` (name to text) and `asked` (the names of those that the answer
        must have). Its prediction has `score`, `feedback`, which names what leaked and what is missing, and
        `measures`: quality and leakage.

    Raises:
        ConfigError: the weight is below 0.
    """
    if not weight >= 0:
        raise ConfigError(f"weight={weight}; it must be 0 or more")
    judged = judge or numeric()

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> dspy.Prediction:  # noqa: ARG001
        details, asked = field_of(example, "details", "example"), field_of(example, "asked", "example")
        query, answer = (str(field_of(prediction, name, "prediction")) for name in ("query", "answer"))
        right = float(judged(example, dspy.Prediction(answer=without(answer, details.values()))))
        missing = [name for name in asked if bare(details[name]) not in bare(answer)]
        leaked = {name: piece for name, text in details.items() if (piece := leak(text, query)) is not None}
        kept = 1 - len(missing) / len(asked) if asked else right
        quality, leakage = (right + kept) / 2, len(leaked) / len(details) if details else 0.0
        return dspy.Prediction(
            score=min(1.0, max(0.0, quality - weight * leakage)),
            feedback=_feedback(right, str(example.answer), missing, leaked),
            measures={"quality": quality, "leakage": leakage},
        )

    return metric


def _feedback(right: float, answer: str, missing: Sequence[str], leaked: dict[str, str]) -> str:
    said = []
    if right < 1:
        said.append(f"the answer should say {answer}")
    if missing:
        said.append(f"the answer lacks {', '.join(missing)}")
    if leaked:
        said.append(f"the query leaks {', '.join(f'{name} ({piece})' for name, piece in leaked.items())}")
    return "; ".join(said) or "right, complete, and nothing leaked"


def leak(detail: str, text: str) -> str | None:
    """Find what a text tells of a personal detail.

    Case, spaces and punctuation do not matter. Telling pieces are the whole; any of its words of three letters or
    more, such as a last name or the domain of an e-mail address (but not ``street``, ``com`` and the like); any four
    of its digits in a row.

    Returns:
        The detail, or the first such piece of it; None when there is none.
    """
    whole = bare(detail)
    if len(whole) >= _WHOLE and whole in bare(text):
        return detail
    said = set(_words(text))
    words = [word for word in _words(detail) if len(word) >= 3 and word.isalpha() and word not in _COMMON]
    if len(whole) < _WHOLE:
        words.append(whole)
    for word in words:
        if word in said:
            return word
    runs = [re.sub(r"\D", "", run) for run in _DIGIT_RUN.findall(text)]
    digits = re.sub(r"\D", "", detail)
    windows = (digits[at : at + _WINDOW] for at in range(len(digits) - _WINDOW + 1))
    return next((window for window in windows if any(window in run for run in runs)), None)


def bare(text: str) -> str:
    """Keep the letters and digits of a text, without case."""
    return "".join(_words(text))


def without(text: str, details: Iterable[str]) -> str:
    """Take details out of a text, however they are spaced and punctuated; then commas and the like around it.

    A short one is taken out as a word, not out of the midst of one: an age of 4 leaves 84 as it is.
    """
    for detail in sorted(details, key=len, reverse=True):
        if whole := bare(detail):
            before, after = (r"(?<![^\W_])", r"(?![^\W_])") if len(whole) < _WHOLE else ("", "")
            text = re.sub(before + r"[\W_]*".join(whole) + after, " ", text, flags=re.IGNORECASE)
    return text.strip(" ,;:.\n")


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).casefold())


def task(seed: int = 0) -> Task:
    """Make the task of answering invented people's sums; the untrusted module waits for its LM, see `Delegate`.

    Args:
        seed: of people, details and questions.

    Returns:
        The task; no two of its requests, traces included, are of the same person.
    """
    rng = random.Random(seed)
    names = Names(rng)
    sizes = (TRAIN, VAL, TEST, TRACES)
    train, val, test, shown = ([request(names, rng) for _ in range(size)] for size in sizes)
    return Task(
        program=Delegate(),
        metric=quality_and_leakage(),
        trainset=train,
        valset=val,
        testset=test,
        traces=write_traces(shown),
        name="delegation",
        settings=SETTINGS,
    )


def request(names: Names, rng: random.Random) -> dspy.Example:
    """Invent a request.

    Returns:
        An example with the input `request` and the labels `answer` (a number), `details`, `asked` and `query` (the
        question without details).
    """
    details = invent_details(names, rng)
    asked = ["name", rng.choice(["phone", "email", "account"])]
    question, answer = rng.choice(_QUESTIONS)(rng)
    given = ", ".join(f"{kind} {text}" for kind, text in details.items() if kind != "name")
    return dspy.Example(
        request=f"I am {details['name']}, {given}. {question.format(details['name'])} Sign with name and {asked[1]}.",
        answer=str(answer),
        details=details,
        asked=asked,
        query=question.format("Someone"),
    ).with_inputs("request")


def invent_details(names: Names, rng: random.Random) -> dict[str, str]:
    """Invent who asks: name, phone, e-mail address and account, by these names."""
    name = names.person()
    first, last = name.lower().split()
    phone, account = ("".join(rng.choices("0123456789", k=size)) for size in (11, 8))
    return {
        "name": name,
        "phone": f"{phone[:4]}-{phone[4:7]}-{phone[7:]}",
        "email": f"{first}.{last}@{names.town().lower()}.example",
        "account": f"{account[:4]} {account[4:]}",
    }


def compose(example: dspy.Example) -> str:
    """Write the perfect answer: ``"Ada Brel, 0417-553-2208: 84"``."""
    return f"{', '.join(example.details[name] for name in example.asked)}: {example.answer}"


def write_traces(examples: Sequence[dspy.Example]) -> dict[str, list[dspy.Example]]:
    """Show rewriter and answerer what to write; the untrusted LM is not taught."""
    rewriter = [dspy.Example(request=each.request, query=each.query) for each in examples]
    answerer = [dspy.Example(request=each.request, reply=each.answer, answer=compose(each)) for each in examples]
    return {
        "rewriter": [trace.with_inputs("request") for trace in rewriter],
        "answerer": [trace.with_inputs("request", "reply") for trace in answerer],
    }


def _cost(rng: random.Random) -> tuple[str, int]:
    count, price = rng.randint(2, 12), rng.randint(2, 40)
    return f"{{}} buys {count} boxes at {price} euros each. How many euros is that?", count * price


def _rest(rng: random.Random) -> tuple[str, int]:
    paid, owed = sorted(rng.sample(range(20, 400), 2))
    return f"{{}} owes {owed} euros and pays {paid}. How many euros are left?", owed - paid


def _hours(rng: random.Random) -> tuple[str, int]:
    days, hours = rng.randint(2, 30), rng.randint(2, 9)
    return f"{{}} works {hours} hours on each of {days} days. How many hours is that?", days * hours


_QUESTIONS: tuple[Callable[[random.Random], tuple[str, int]], ...] = (_cost, _rest, _hours)
