"""SGLang's n-gram worker with lpr's trees instead of its corpus (SGLang 0.5.23: srt/speculative/ngram_worker.py).

SGLang verifies the trees in one forward, moves the accepted KV entries and applies grammar masks, as for its n-grams.
Each tensor-parallel rank drafts the same trees from the same texts, without communication.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lpr.sglang.trees import Trees


class Corpus:
    """The interface of SGLang's corpus, implemented by lpr's index."""

    def __init__(self, trees: Trees) -> None:
        """A corpus whose texts are learnt into `trees`."""
        self._trees = trees
        self._counts: dict[str, int] = {}

    def reset(self) -> None:
        self._trees.reset()
        self._counts.clear()

    def erase_match_state(self, req_ids: Sequence[str]) -> None:
        self._trees.end(req_ids)

    def load_external_corpus_named(self, corpus_id: str, chunks: Iterable[Sequence[int]]) -> int:
        count = 0
        for chunk in chunks:
            self._trees.learn(chunk)
            count += len(chunk)
        return count

    def commit_external_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        self._counts[corpus_id] = loaded_token_count

    def remove_external_corpus(self, corpus_id: str) -> None:
        """Raises ValueError: the index evicts its oldest tokens, and cannot remove a corpus by name."""
        raise ValueError(f"lpr's index cannot forget corpus {corpus_id!r} alone; flush the cache to forget all")

    def list_external_corpora(self) -> dict[str, int]:
        return dict(self._counts)


def worker_class() -> type:
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative import ngram_worker

    class LookaheadWorker(ngram_worker.NGRAMWorker):
        """SGLang's worker with trees drafted from whole texts."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            spec = get_spec()
            depth, capacity = spec.speculative_ngram_max_trie_depth, spec.speculative_ngram_capacity
            self.trees = Trees(spec.speculative_num_draft_tokens, depth, capacity)
            its = ngram_worker.NgramCorpus
            # The base class creates its corpus in its constructor.
            ngram_worker.NgramCorpus = lambda **_: Corpus(self.trees)
            try:
                super().__init__(*args, **kwargs)
            finally:
                ngram_worker.NgramCorpus = its

        def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
            """The trees of a batch. With overlap the last round's tokens are not in `output_ids` yet."""
            late: list[list[int]] = [[] for _ in batch.reqs]
            if self.enable_overlap and not batch.grammar_needs_sync():
                tokens = batch.spec_info.accept_tokens.cpu().tolist()
                counts = batch.spec_info.accept_lens.cpu().tolist()
                width = self.draft_token_num
                late = [tokens[row * width : row * width + count] for row, count in enumerate(counts)]
            return self.trees.draft(
                [req.rid for req in batch.reqs],
                [req.origin_input_ids_unpadded for req in batch.reqs],
                [[*req.output_ids, *news] for req, news in zip(batch.reqs, late, strict=True)],
            )

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Does nothing: the next draft reads the emitted tokens."""

    return LookaheadWorker
