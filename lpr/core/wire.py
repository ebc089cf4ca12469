"""The layout of a step's payload: what every rank sends in the step's one all-gather. Twin: native/wire.h.

A payload is int32 words, equally many on all ranks (rule R2):

    header    NUM_HEADER words: the digest of the state that all ranks hold (low, high), the length of the commands that
              the driver broadcasts after the step (rule R3), the number of candidates per node, the microseconds that
              the rank has taken, from which draft-only ranks compute how many passes fit into a step, and with tensor
              parallelism a digest of the rows that the rank has evaluated, which is the same within a replica
    trees     NUM_TREE_HEADER words per tree that the rank serves: the digest of the state that only the tree's home
              ranks hold (low, high), and the number of its nodes that the rank owns
    results   per tree that the rank serves, a table of `capacity` nodes with `width` words. A node that the rank owns
              has its next token, k candidates, their scores (four per word), log-probabilities in steps in which a
              running request asks for them, and, if ranks do not draft each other's trees, the node itself
    guesses   per tree that the rank serves, a block of a prediction head's guesses, if there is a head
              (lpr.core.heads); a draft-only rank has a block for every tree of the step, in the order of the trees

A rank drafts only the trees of requests that it serves. Of other trees it needs the accepted path, and the places and
sources of the nodes, which are counted. So a node is sent as two words: its number, its parent's number and its source
in one, its token in the other. From the nodes that each rank owns, the other ranks rebuild the tree and its shards; a
tree of one rank alone is only read (LoneTree in native/wire.h).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lpr.config import TreeSizes
from lpr.core.heads import block_words
from lpr.core.partition import Shard
from lpr.core.state import TreeResult
from lpr.core.tree import TokenTree
from lpr.protocol import TokenLogprobs

NUM_HEADER = 6
TIME_WORD = 4  # of the header: microseconds
ROWS_WORD = 5  # the digest of evaluated rows
NUM_TREE_HEADER = 3
NUM_NODE_WORDS = 2
NODE_BITS = 14
"""Bits of a node's number (a tree has up to 2^14 nodes, DecodeConfig); then as many bits of its parent, then its
source."""
_NODE = (1 << NODE_BITS) - 1
_NO_TREE = "the nodes that ranks have sent are no tree"

Served = Sequence[Sequence[int]]  # per rank, the trees that it evaluates, in the order of its rows


def result_words(k: int) -> int:
    """Words of a node's result: its next token, k candidates and their scores."""
    return 1 + k + -(-k // 4)


def logprob_words(n: int | None) -> int:
    """Words of a node's log-probabilities: its next token's, and the n most likely tokens with theirs; 0 for None."""
    return 0 if n is None else 1 + 2 * n


def node_width(sizes: TreeSizes, carries_trees: bool, num_logprobs: int | None = None) -> int:
    """Words per node in the results; with `carries_trees` they include the node itself."""
    return result_words(sizes.num_recycled) + logprob_words(num_logprobs) + NUM_NODE_WORDS * carries_trees


def payload_words(
    sizes: TreeSizes, num_trees: int, num_ranks: int, carries_trees: bool = False, num_logprobs: int | None = None
) -> int:
    """Words per rank in the gather of up to `num_trees` trees of `num_ranks` ranks."""
    table = sizes.owned_capacity(num_ranks) * node_width(sizes, carries_trees, num_logprobs)
    return NUM_HEADER + num_trees * (NUM_TREE_HEADER + table + block_words(sizes.num_guesses))


def room_of(num_words: int, capacity: int, width: int, num_guesses: int = 0) -> int:
    """The number of trees that a payload of `num_words` words has room for."""
    return (num_words - NUM_HEADER) // (NUM_TREE_HEADER + capacity * width + block_words(num_guesses))


def first_result(num_words: int, capacity: int, width: int, num_guesses: int = 0) -> int:
    """Where the results begin in a payload of `num_words` words."""
    return NUM_HEADER + room_of(num_words, capacity, width, num_guesses) * NUM_TREE_HEADER


def tables_of(payloads: np.ndarray, capacity: int, width: int, num_guesses: int = 0) -> np.ndarray:
    """The results of `payloads` [ranks, words], as a view int32 [ranks, trees, capacity, width]."""
    room = room_of(payloads.shape[1], capacity, width, num_guesses)
    begin = NUM_HEADER + room * NUM_TREE_HEADER
    return payloads[:, begin : begin + room * capacity * width].reshape(len(payloads), room, capacity, width)


def blocks_of(payloads: np.ndarray, capacity: int, width: int, num_guesses: int) -> np.ndarray:
    """The guesses of heads in `payloads` [ranks, words], as a view int32 [ranks, trees, words of a block]."""
    room, words = room_of(payloads.shape[1], capacity, width, num_guesses), block_words(num_guesses)
    return payloads[:, payloads.shape[1] - room * words :].reshape(len(payloads), room, words)


def pack_header(
    digest: int, num_command_bytes: int, num_candidates: int, tree_digests: Sequence[int], num_owned: Sequence[int]
) -> np.ndarray:
    """A rank's header and tree headers, in the order of its trees."""
    words = [*_halves(digest), num_command_bytes, num_candidates, 0, 0]
    for tree_digest, count in zip(tree_digests, num_owned, strict=True):
        words += [*_halves(tree_digest), count]
    return np.array(words, np.int64).astype(np.int32)


def _halves(digest: int) -> tuple[int, int]:
    return digest & 0xFFFFFFFF, digest >> 32


def num_command_bytes(payloads: np.ndarray) -> int:
    """The length in bytes of the commands that the driver, world rank 0, is about to broadcast."""
    return int(payloads[0, 2])


def num_candidates(payload: np.ndarray) -> int:
    """The number of candidates per node in a rank's payload."""
    return int(payload[3])


def microseconds(payload: np.ndarray) -> int:
    """The microseconds that a rank has spent on the step before the gather."""
    return int(payload[TIME_WORD])


def tree_header(payload: np.ndarray, place: int) -> np.ndarray:
    """The header [NUM_TREE_HEADER] of the tree number `place` of a rank."""
    begin = NUM_HEADER + place * NUM_TREE_HEADER
    return payload[begin : begin + NUM_TREE_HEADER]


def places_of(tree: int, served: Served) -> list[int]:
    """Per rank, the index of a tree among those of the rank; 0 if the rank does not evaluate it."""
    return [list(trees).index(tree) if tree in trees else 0 for trees in served]


def tree_digests(payloads: np.ndarray, served: Served) -> dict[int, list[tuple[int, list[int]]]]:
    """Per tree, the world ranks that evaluate it and the digests that they send.

    `payloads` are those of all world ranks, `served` the trees of every replica.
    """
    found: dict[int, list[tuple[int, list[int]]]] = {}
    replica_size = len(payloads) // len(served)
    for rank, payload in enumerate(payloads):
        for place, tree in enumerate(served[rank // replica_size]):
            found.setdefault(tree, []).append((rank, tree_header(payload, place)[:2].tolist()))
    return found


def headers_agree(payloads: np.ndarray, served: Served) -> bool:
    """True if the digests of all ranks agree, per tree those of the ranks that evaluate it, and per replica the rows'.

    See `tree_digests`.
    """
    rows = payloads[:, ROWS_WORD].reshape(len(served), -1)
    if (payloads[:, :2] != payloads[0, :2]).any() or (rows != rows[:, :1]).any():
        return False
    return all(each == sent[0][1] for sent in tree_digests(payloads, served).values() for _, each in sent)


def read_result(tables: np.ndarray, places: Sequence[int], shards: Sequence[Shard], k: int) -> TreeResult:
    """A tree's results, each node's from its owner (rule R1); `places` has the tree's index per rank."""
    table = owned_rows(tables, places, shards)
    scores = np.ascontiguousarray(table[:, 1 + k : result_words(k)]).astype("<i4").view(np.uint8)[:, :k]
    return TreeResult(table[:, 0].tolist(), table[:, 1 : 1 + k].tolist(), scores.tolist())


def read_logprobs(
    payloads: np.ndarray, tables: np.ndarray, places: Sequence[int], shards: Sequence[Shard], n: int
) -> list[TokenLogprobs]:
    """Every node's log-probabilities, which follow the result that its owner has sent."""
    begins = [result_words(num_candidates(payload)) for payload in payloads]
    width = logprob_words(n)
    aligned = np.stack([table[..., begin : begin + width] for begin, table in zip(begins, tables, strict=True)])
    rows = owned_rows(aligned, places, shards)
    tokens, floats = rows[:, 1 : 1 + n].tolist(), rows.view(np.float32)
    tops = [list(zip(*each, strict=True)) for each in zip(tokens, floats[:, 1 + n :].tolist(), strict=True)]
    return [TokenLogprobs(*each) for each in zip(floats[:, 0].tolist(), tops, strict=True)]


def owned_rows(tables: np.ndarray, places: Sequence[int], shards: Sequence[Shard]) -> np.ndarray:
    """Each node's row [nodes, columns], from its owner's table."""
    table = np.empty((sum(len(shard.owned) for shard in shards), tables.shape[3]), np.int32)
    for rank, shard in enumerate(shards):
        if shard.owned:
            table[np.array(shard.owned, np.intp)] = tables[rank, places[rank], : len(shard.owned)]
    return table


def node_words(tree: TokenTree, nodes: Sequence[int]) -> np.ndarray:
    """The two words of each of `nodes`, int64 [n]: the token above the number, the parent's number and the source."""
    words = [
        tree.tokens[node] << 32
        | int(tree.sources[node]) << 2 * NODE_BITS
        | max(0, tree.parents[node]) << NODE_BITS
        | node
        for node in nodes
    ]
    return np.array(words, np.int64)


def read_tree(
    words: np.ndarray, homes: Sequence[int], places: Sequence[int], counts: Sequence[int], num_ranks: int
) -> tuple[TokenTree, list[Shard]]:
    """Rebuild the tree that `homes` evaluated, and its shards, from the words of the nodes that each of them owns.

    `words` is int32 [ranks, trees, capacity, 2]; `places` has the tree's index per rank and `counts` the number of
    nodes that each rank owns. Raises ValueError if the words are not a valid tree.
    """
    if not all(0 <= counts[rank] <= words.shape[2] for rank in homes):
        raise ValueError(_NO_TREE)
    mine = [words[rank, places[rank], : counts[rank]] for rank in homes]
    rows = np.concatenate(mine)
    numbers = rows[:, 0] & _NODE
    order = np.argsort(numbers, kind="stable")
    if not len(rows) or not np.array_equal(numbers[order], np.arange(len(rows))):
        raise ValueError(_NO_TREE)
    parents = rows[order, 0] >> NODE_BITS & _NODE
    sources = rows[order, 0] >> 2 * NODE_BITS & 0xF  # not the sign
    tree = TokenTree(int(rows[order[0], 1]))
    for node, (token, parent, source) in enumerate(zip(rows[order, 1], parents, sources, strict=True)):
        if node and (parent >= node or tree.add(int(parent), int(token), int(source)) != node):
            raise ValueError(_NO_TREE)
    shards = [Shard([], []) for _ in range(num_ranks)]
    for rank, those in zip(homes, mine, strict=True):
        owned = (those[:, 0] & _NODE).tolist()
        shards[rank] = Shard(sorted({0}.union(*(tree.path_to(node) for node in owned))), owned)
    return tree, shards
