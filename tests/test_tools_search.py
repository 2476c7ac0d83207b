"""Search over documents in memory."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("bm25s", reason="search needs modpo[tools]")

from modpo.errors import ToolError
from modpo.programs.tools import CorpusSearch, as_tool

CAPITALS = {
    "Paris": "Paris is the capital of France.",
    "Rome": "Rome is the capital of Italy.",
    "Everest": "The highest mountain of all, 8849 m.",
}


def test_the_document_with_the_telling_words_comes_first() -> None:
    corpus = CorpusSearch(CAPITALS, k=2)
    rome, paris = "Rome | Rome is the capital of Italy.", "Paris | Paris is the capital of France."
    assert corpus.find("What is the capital of ITALY?") == [rome, paris]
    assert corpus.find("everest") == ["Everest | The highest mountain of all, 8849 m."]
    assert corpus.find("8849") == ["Everest | The highest mountain of all, 8849 m."]


def test_documents_without_a_word_of_the_query_are_not_found() -> None:
    corpus = CorpusSearch(list(CAPITALS.values()), k=3)
    assert corpus.find("capital") == [CAPITALS["Paris"], CAPITALS["Rome"]]
    for query in ("zebra", "", "the of is", "?!"):
        assert corpus.find(query) == []
        assert corpus.search(query) == "no document matches"


def test_equal_documents_keep_their_order() -> None:
    corpus = CorpusSearch([f"apple number{i}" for i in range(50)], k=3)
    assert corpus.find("apple") == ["apple number0", "apple number1", "apple number2"]


def test_scores_are_those_of_bm25() -> None:
    # Lucene's BM25 with k1 1.5, b 0.75: idf = ln(1 + (N - n + 0.5) / (n + 0.5)), N = 2 documents, mean length 3.
    corpus = CorpusSearch(["red red fox dog", "red cat"], k=2)
    assert corpus.find("red cat") == ["red cat", "red red fox dog"]
    assert corpus.find("red") == ["red red fox dog", "red cat"]  # 2 / (2 + 1.875) = 0.516 > 1 / (1 + 1.125) = 0.471
    assert corpus._index.get_scores(["red"]) == pytest.approx([0.516129 * 0.182322, 0.470588 * 0.182322], rel=1e-4)


def test_it_is_a_tool() -> None:
    tool = as_tool(CorpusSearch(CAPITALS).search)
    assert tool.describe() == "search(query: string) -> the best documents, numbered: Search documents by words."
    text = "[1] Rome | Rome is the capital of Italy.\n[2] Paris | Paris is the capital of France."
    assert tool.run("capital of Italy").text == text


def test_threads_and_copies_share_it() -> None:
    corpus = CorpusSearch([f"word{i} and word{i + 1}" for i in range(200)], k=2)
    assert copy.deepcopy(corpus) is corpus
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda i: corpus.find(f"word{i}")[-1], range(1, 200)))
    assert found == [f"word{i} and word{i + 1}" for i in range(1, 200)]


def test_a_corpus_of_stop_words_finds_nothing() -> None:
    assert CorpusSearch(["", "the"]).find("the") == []


@pytest.mark.parametrize(
    ("documents", "k", "message"),
    [
        ("one text", 3, "documents are str: give a list"),
        ([], 3, "no documents to search"),
        ([1], 3, "a document is int: '1'"),
        (["a"], 0, "k is how many documents"),
    ],
)
def test_what_cannot_be_searched_is_refused(documents: Any, k: int, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        CorpusSearch(documents, k=k)
