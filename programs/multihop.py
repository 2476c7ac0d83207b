"""Multi-hop search: a query, what it finds and a note, several times in turn, then an answer.

The shape of the program for HoVer in mmGRPO (arXiv 2508.04660), with an answer instead of a list of documents. Its
world is of invented people, firms and towns, so that every answer is known and no model has read it. Each document
says where the next one is: ``Ada Brel works for Tolvane Mills.``, ``Tolvane Mills is based in Karsk.``
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dspy

from modpo.errors import TaskError
from modpo.programs.invented import Names
from modpo.programs.judges import exact
from modpo.programs.xml import XMLPredict
from modpo.task import Task

TRAIN, VAL, TEST, TRACES = 400, 64, 200, 96
FOUND = 3  # documents per search
MOST_HOPS = 4  # of the task, as in HoVer
NO_NOTES = "none"
SETTINGS = {"steps": 24, "warm_start": {"epochs": 3, "learning_rate": 3e-4, "batch_size": 8}}


class WriteQuery(dspy.Signature):
    """Write what to search next."""

    question: str = dspy.InputField()
    notes: str = dspy.InputField()
    query: str = dspy.OutputField()


class TakeNote(dspy.Signature):
    """Note what was found for the query."""

    query: str = dspy.InputField()
    passages: str = dspy.InputField()
    note: str = dspy.OutputField()


class Answer(dspy.Signature):
    """Answer with a name."""

    question: str = dspy.InputField()
    notes: str = dspy.InputField()
    answer: str = dspy.OutputField()


class MultiHop(dspy.Module):
    """Answer a question whose facts must be found one after the other.

    Modules: `querier` and `noter`, called once a hop, and `answerer`, called once. The notes of earlier hops are
    joined by spaces; before the first they are ``none``.

    Args:
        search: takes a query and returns passages as text; shared by all rollouts, and what it raises ends the run.
        hops: searches per question, 1 or more.
        predictor: makes a module of a signature, such as `dspy.ChainOfThought`.

    Raises:
        TaskError: there are no hops, or the search cannot be called.
    """

    def __init__(
        self,
        search: Callable[[str], str],
        hops: int = 2,
        predictor: Callable[[type[dspy.Signature]], dspy.Module] = XMLPredict,
    ) -> None:
        super().__init__()
        if hops < 1:
            raise TaskError(f"hops={hops}; at least 1")
        if not callable(search):
            raise TaskError(f"search is a {type(search).__name__}; give a function of a query that returns a text")

        def shared(query: str) -> str:
            return search(query)

        # A function is not copied with the program; the index behind a method would be, once a rollout.
        self.search = shared
        self.hops = hops
        self.querier = predictor(WriteQuery)
        self.noter = predictor(TakeNote)
        self.answerer = predictor(Answer)

    def forward(self, question: str) -> dspy.Prediction:
        """Answer a question; the prediction has `answer`, `notes` and the list `queries`."""
        notes: list[str] = []
        queries: list[str] = []
        for _ in range(self.hops):
            queries.append(self.querier(question=question, notes=joined(notes)).query)
            notes.append(self.noter(query=queries[-1], passages=self.search(queries[-1])).note)
        answer = self.answerer(question=question, notes=joined(notes)).answer
        return dspy.Prediction(answer=answer, notes=joined(notes), queries=queries)


def joined(notes: Sequence[str]) -> str:
    """Write notes as modules see them."""
    return " ".join(notes) or NO_NOTES


def task(seed: int = 0, hops: int = 2) -> Task:
    """Make the task of answering about invented people, firms and towns.

    Every split is about a part of the world of its own: no document that a question needs is needed by a question of
    another split. All documents are searched together. The search needs bm25s.

    Args:
        seed: of the world and of the questions.
        hops: documents that a question needs, one after the other, 1 .. 4.

    Raises:
        TaskError: no question has so many hops.
    """
    if not 1 <= hops <= MOST_HOPS:
        raise TaskError(f"hops={hops}; allowed: 1 .. {MOST_HOPS}")
    from modpo.programs.tools.search import CorpusSearch

    rng = random.Random(seed)
    names = Names(rng)
    sizes = {"train": TRAIN, "val": VAL, "test": TEST, "traces": TRACES}
    parts = {split: Part.make(size, names, rng) for split, size in sizes.items()}
    documents = [pair for part in parts.values() for pair in part.documents.items()]
    rng.shuffle(documents)
    search = CorpusSearch(dict(documents), k=FOUND).search  # with titles: a name's own document is found first
    chains = {split: part.chains(hops, sizes[split], rng) for split, part in parts.items()}
    train, val, test = ([example_of(chain) for chain in chains[split]] for split in ("train", "val", "test"))
    return Task(
        program=MultiHop(search, hops),
        metric=exact("answer"),
        trainset=train,
        valset=val,
        testset=test,
        traces=write_traces(chains["traces"], parts["traces"].documents, search),
        name="multihop",
        settings=SETTINGS,
    )


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the world: what each entity leads to, and the one document about it.

    Attributes:
        leads: person to employer, firm to town, town to mayor.
        kinds: entity to ``person``, ``firm`` or ``town``.
        documents: entity to the text that says what it leads to.
    """

    leads: Mapping[str, str]
    kinds: Mapping[str, str]
    documents: Mapping[str, str]

    @classmethod
    def make(cls, questions: int, names: "Names", rng: random.Random) -> "Part":
        """Invent a part with enough entities for so many questions, with some to spare."""
        towns = [names.town() for _ in range(questions // 5 + 4)]
        firms = [names.firm() for _ in range(2 * len(towns))]
        people = [names.person() for _ in range(4 * len(towns))]
        mayors = rng.sample(people, len(towns))
        leads = {person: rng.choice(firms) for person in people} | {firm: rng.choice(towns) for firm in firms}
        leads |= dict(zip(towns, mayors, strict=True))
        kinds = {**dict.fromkeys(people, "person"), **dict.fromkeys(firms, "firm"), **dict.fromkeys(towns, "town")}
        return cls(leads, kinds, {name: _document(name, kinds[name], leads[name], rng) for name in leads})

    def chains(self, hops: int, size: int, rng: random.Random) -> list["Chain"]:
        """Draw questions, each from another entity; none that fewer documents answer."""
        starts = list(self.leads)
        rng.shuffle(starts)
        found = (self._chain(start, hops) for start in starts)
        kept = [chain for chain in found if chain is not None]
        assert len(kept) >= size, "a part is made large enough"
        return kept[:size]

    def _chain(self, start: str, hops: int) -> "Chain | None":
        """The question that starts at an entity, unless it comes by one twice or ends next to where it began."""
        entities = [start]
        for _ in range(hops):
            entities.append(self.leads[entities[-1]])
        if len(set(entities)) <= hops or (hops > 1 and self.leads[entities[-1]] == start):
            return None
        return Chain(tuple(entities), self.kinds[start])


@dataclass(frozen=True, slots=True)
class Chain:
    """A question: the entities from the one it names to its answer, and the kind of the first."""

    entities: tuple[str, ...]
    kind: str

    @property
    def question(self) -> str:
        """The question: ``Name the town where the firm that Ada Brel works for is based.``"""
        asked = self.entities[0]
        for kind in self._kinds():
            asked = _ASKED[kind].format(asked)
        return f"Name {asked}."

    def _kinds(self) -> Iterator[str]:
        order = ("person", "firm", "town")
        begin = order.index(self.kind)
        return (order[(begin + hop) % 3] for hop in range(len(self.entities) - 1))


_ASKED = {"person": "the firm that {} works for", "firm": "the town where {} is based", "town": "the mayor of {}"}


def _document(name: str, kind: str, lead: str, rng: random.Random) -> str:
    """Write what is known of an entity; the numbers and trades are of no use."""
    if kind == "person":
        return f"{name}, a {rng.choice(_TRADES)}, works for {lead}."
    if kind == "firm":
        return f"{name} makes {rng.choice(_GOODS)} and is based in {lead}."
    return f"{name} has {rng.randint(2, 90)} streets and its mayor is {lead}."


def example_of(chain: Chain) -> dspy.Example:
    """Make an example: `question` is its input, `answer` and `support` (the entities to look up) its labels."""
    support = list(chain.entities[:-1])
    return dspy.Example(question=chain.question, answer=chain.entities[-1], support=support).with_inputs("question")


def write_traces(
    chains: Sequence[Chain], documents: Mapping[str, str], search: Callable[[str], str]
) -> dict[str, list[dspy.Example]]:
    """Show each module what to write, on what it would be given: a query is a name, a note a document."""
    traces: dict[str, list[dspy.Example]] = {"querier": [], "noter": [], "answerer": []}
    for chain in chains:
        notes: list[str] = []
        for name in chain.entities[:-1]:
            shown: dict[str, Any] = {"question": chain.question, "notes": joined(notes), "query": name}
            traces["querier"].append(dspy.Example(shown).with_inputs("question", "notes"))
            notes.append(documents[name])
            shown = {"query": name, "passages": search(name), "note": notes[-1]}
            traces["noter"].append(dspy.Example(shown).with_inputs("query", "passages"))
        shown = {"question": chain.question, "notes": joined(notes), "answer": chain.entities[-1]}
        traces["answerer"].append(dspy.Example(shown).with_inputs("question", "notes"))
    return traces


_TRADES = ("baker", "clerk", "driver", "nurse", "tailor", "welder", "writer")
_GOODS = ("rope", "glass", "paper", "shoes", "soap", "tiles", "wire")
