"""Search over documents in memory, by BM25."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Self, final

from modpo.errors import ToolError

NO_HIT = "no document matches"
_TOKEN = re.compile(r"\w+")


@final
class CorpusSearch:
    """The documents that share the most telling words with a query; its tool is `as_tool(corpus.search)`.

    Built once, then only read: it is shared by all rollouts. English stop words are left out, letters lowered.
    BM25 is Lucene's variant (Robertson and Zaragoza 2009; Kamphuis et al. 2020), by the library bm25s.

    Args:
        documents: texts, or titles with their texts; a title is searched too, and stands first: "title | text".
        k: most documents per query.

    Raises:
        ToolError: there are no documents, they are no texts, k is below 1, or bm25s is not installed.
    """

    def __init__(self, documents: Sequence[str] | Mapping[str, str], k: int = 3) -> None:
        self.documents = _texts(documents)
        if k < 1:
            raise ToolError(f"CorpusSearch(k={k!r}) would find nothing: k is how many documents, 1 or more")
        self.k = k
        try:
            import bm25s
            from bm25s.stopwords import STOPWORDS_EN
        except ImportError:
            raise ToolError("CorpusSearch needs bm25s; install it with: pip install 'modpo[tools]'") from None
        self._stop = frozenset(STOPWORDS_EN)
        tokens = [self._tokens(text) for text in self.documents]
        self._vocabulary = frozenset(token for each in tokens for token in each)
        self._index = bm25s.BM25(method="lucene", backend="numpy")
        if self._vocabulary:
            self._index.index(tokens, show_progress=False)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self

    def find(self, query: str) -> list[str]:
        """Find up to k documents, best first; of equal ones the earlier comes first.

        Args:
            query: words; one that no document has is passed over.

        Returns:
            The documents; none if no word of the query is in any.
        """
        import numpy as np

        known = [token for token in self._tokens(query) if token in self._vocabulary]
        if not known:
            return []
        scores = self._index.get_scores(known)
        best = np.argsort(-scores, kind="stable")[: self.k]
        return [self.documents[index] for index in best if scores[index] > 0]

    def search(self, query: str) -> str:
        """Search documents by words.

        Returns:
            the best documents, numbered
        """
        found = self.find(query)
        return "\n".join(f"[{place}] {text}" for place, text in enumerate(found, 1)) or NO_HIT

    def _tokens(self, text: str) -> list[str]:
        return [token for token in _TOKEN.findall(text.lower()) if token not in self._stop]


def _texts(documents: Sequence[str] | Mapping[str, str]) -> tuple[str, ...]:
    """The documents as they are shown, each a text."""
    if isinstance(documents, str | bytes) or not isinstance(documents, Sequence | Mapping):
        raise ToolError(f"documents are {type(documents).__name__}: give a list of texts, or a dict of title to text")
    for each in documents.values() if isinstance(documents, Mapping) else documents:
        if not isinstance(each, str):
            raise ToolError(f"a document is {type(each).__name__}: {str(each)[:60]!r}; each must be a text")
    if isinstance(documents, Mapping):
        texts = tuple(f"{title} | {text}" for title, text in documents.items())
    else:
        texts = tuple(documents)
    if not texts:
        raise ToolError("there are no documents to search; give at least one")
    return texts
