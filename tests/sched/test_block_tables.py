"""The pages of a rank: property tests of tables, shares and counts against a plain dictionary, and mutants."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpr.sched import page_pool
from lpr.sched.block_tables import RankPages
from lpr.sched.page_moves import PageClear, PageCopy, PageIn, PageOut
from lpr.sched.page_pool import PagePool
from lpr.sched.prefix_tree import Node

SIZE = 4
NOISE = "nobody", (-1,)


@dataclass(eq=False)
class Request:
    tokens: list[int]
    tenant: str = ""
    slots: list[int] = field(default_factory=lambda: [-1])
    num_computed_tokens: list[int] = field(default_factory=lambda: [0])
    num_left: int = 0


class Model:
    """K/V as a dictionary: per page and place, the tokens up to there whose K/V it holds."""

    def __init__(self, num_pages: int, num_host_pages: int = 0) -> None:
        self.pool = PagePool(num_pages, SIZE, num_host_pages)
        self.pages: RankPages[Any] = RankPages(0, 4, self.pool)
        self.rows: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.host: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.num_hits = 0
        self.followed: dict[int, list[int]] = {}
        """By slot, the tables as far as `take_changed` tells."""

    def enter(self, request: Request) -> bool:
        if not self.pages.has_room(request, 2):
            return False
        held = self.pages.held(request)
        computed = self.pages.enter(request)
        assert computed <= held < len(request.tokens)
        self.move()
        request.num_computed_tokens = [computed]
        self.num_hits += computed
        self.check()
        return True

    def move(self) -> None:
        """Carry out what the pool has decided; a page that nobody owns any more holds noise."""
        for move in self.pool.moves:
            for place in range(SIZE):
                match move:
                    case PageCopy():
                        if place < move.num_rows:
                            self.rows[move.target, place] = self.rows[move.source, place]
                    case PageClear():
                        self.rows.pop((move.page, place), None)
                    case PageOut():
                        self.host[move.host_page, place] = self.rows.get((move.page, place), NOISE)
                        self.rows[move.page, place] = NOISE
                    case PageIn():
                        self.rows[move.page, place] = self.host[move.host_page, place]
        self.pool.moves = []

    def compute(self, request: Request, count: int) -> None:
        """Compute K/V of the next tokens of a request, and of two nodes behind them that are rejected."""
        request.num_computed_tokens = [self.pages.follow(request, request.num_computed_tokens[0])]
        first = request.num_computed_tokens[0]
        last = min(first + count, len(request.tokens))
        if not self.pages.reserve(request, last + 2):
            return
        self.move()
        table = self.pages.table(request)
        shared = {node.page for node in table.nodes}
        for position in range(first, last + 2):
            page = table.pages[position // SIZE]
            assert page not in shared, "a shared page is written to"
            tokens = tuple(request.tokens[: position + 1]) if position < last else (-1,)
            self.rows[page, position % SIZE] = request.tenant, tokens
        request.num_computed_tokens = [last]
        self.pages.register(request, last)
        self.check()

    def check(self) -> None:
        """Every computed token of every running request is where its table says; pages are counted right."""
        tables = [self.pages.table(request) for request in self.pages.running]
        for slot, pages, first in self.pages.take_changed():
            self.followed[slot] = [*self.followed.get(slot, [])[:first], *pages]
        for slot, each in enumerate(tables):
            assert self.followed.get(slot, [])[: len(each.pages)] == each.pages
        assert not self.pages.take_changed()
        for request, table in zip(self.pages.running, tables, strict=True):
            for position in range(request.num_computed_tokens[0]):
                found = self.rows[table.pages[position // SIZE], position % SIZE]
                assert found == (request.tenant, tuple(request.tokens[: position + 1]))
        users: dict[int, int] = {}
        for table in tables:
            assert [node.page for node in table.nodes] == table.pages[: len(table.nodes)]
            for page in table.pages:
                users[page] = users.get(page, 0) + 1
        known = {node.page: node for table in tables for node in table.nodes}
        for page, count in users.items():
            assert count == (known[page].num_users if page in known else 1)
        assert len(users) == self.pool.num_held
        nodes = [node for root in self.pool.roots for node in below(root)]
        cached, hosted = [n.page for n in nodes if n.is_resident], [n.host_page for n in nodes if not n.is_resident]
        assert len(set(cached)) == len(cached) and len(set(hosted)) == len(hosted) == self.pool.num_swapped_pages
        assert all(not (node.is_resident or node.num_users) for each in nodes if not each.is_resident
                   for node in below(each)), "what is behind a page in host memory is there, too"  # fmt: skip
        assert len(set(cached) - set(users)) == self.pool.num_cached_pages
        assert self.pool.num_cached_tokens == sum(len(n.tokens) for root in self.pool.roots for n in below(root))


def below(node: Node) -> list[Node]:
    return [each for child in node.children.values() for each in (child, *below(child))]


Steps = st.lists(
    st.tuples(
        st.sampled_from(["enter", "compute", "finish", "fail", "grow", "forget"]),
        st.integers(0, 7),
        st.lists(st.integers(0, 1), min_size=1, max_size=14),
        st.sampled_from(["", "other"]),
    ),
    max_size=60,
)


def run(steps: list[tuple[str, int, list[int], str]], num_pages: int, num_host_pages: int = 0) -> int:
    model = Model(num_pages, num_host_pages)
    for what, number, tokens, tenant in steps:
        running = model.pages.running
        if what == "enter":
            model.enter(Request([*tokens[:2] * 3, *tokens], tenant, num_left=number))
        elif what == "forget":
            model.pages.forget()
        elif running:
            request = running[number % len(running)]
            if what == "compute":
                model.compute(request, number + 1)
            elif what == "grow" and request.num_computed_tokens[0] == len(request.tokens):
                request.tokens += tokens[:3]
            elif what in ("finish", "fail"):
                model.pages.leave(request, keep=what == "finish")
                model.move()
                assert request.slots == [-1]
        model.check()
    for request in list(model.pages.running):
        model.pages.leave(request)
    model.check()
    assert model.pool.num_held == 0
    model.pages.forget()
    assert model.pool.num_cached_pages == model.pool.num_cached_tokens == model.pool.num_swapped_pages == 0
    return model.num_hits


@settings(max_examples=250, deadline=None)
@given(Steps, st.integers(6, 24), st.sampled_from([0, 1, 4, 40]))
def test_tables_against_a_dictionary(
    steps: list[tuple[str, int, list[int], str]], num_pages: int, num_host_pages: int
) -> None:
    run(steps, num_pages, num_host_pages)


def test_a_page_that_is_shared_is_told_though_none_is_added() -> None:
    pages: RankPages[Any] = RankPages(0, 4, PagePool(20, SIZE, 0))
    requests = [Request([1] * (2 * SIZE + 1), "", num_left=1) for _ in range(2)]
    for request in requests:
        pages.enter(request)
        request.num_computed_tokens = [0]
        assert pages.reserve(request, 2 * SIZE + 1)
    assert len(pages.take_changed()) == 2 and pages.take_changed() == []
    for request in requests:
        request.num_computed_tokens = [SIZE]
        pages.register(request, SIZE)
    first, second = (pages.table(request).pages for request in requests)
    assert first[0] == second[0] and pages.take_changed() == [(1, second, 0)]


def random_runs(seed: int = 0, count: int = 300) -> int:
    dice = Random(seed)
    hits = 0
    for _ in range(count):
        steps = [
            (
                dice.choice(["enter", "compute", "compute", "finish", "fail", "grow", "forget", "enter"]),
                dice.randrange(8),
                [dice.randrange(2) for _ in range(dice.randrange(1, 15))],
                dice.choice(["", "", "other"]),
            )
            for _ in range(60)
        ]
        hits += run(steps, dice.randrange(6, 24))
    return hits


def crowded_runs(num_host_pages: int) -> int:
    """Many texts and few pages, which are taken all the time; returns the tokens that were found."""
    dice = Random(1)
    texts = [[dice.randrange(9) for _ in range(14)] for _ in range(6)]
    hits = 0
    for _ in range(60):
        steps = [
            (
                dice.choice(["enter", "compute", "compute", "finish", "grow"] + ["fail"] * (not number % 20)),
                dice.randrange(8, 16),
                dice.choice(texts)[: dice.randrange(8, 15)],
                dice.choice(["", "", "other"]),
            )
            for number in range(120)
        ]
        hits += run(steps, dice.randrange(8, 16), num_host_pages)
    return hits


def test_tenants_without_pages_are_forgotten() -> None:
    pool = PagePool(8, 4)
    pages: RankPages[Any] = RankPages(0, 2, pool)
    kept = Request([1, 2, 3, 4, 5], tenant="kept")
    pages.enter(kept)
    for number in range(1000):
        request = Request([number, 1, 2, 3, 4, 5], tenant=f"tenant {number}")
        assert pages.known(request) == 0
        pages.enter(request)
        assert pages.reserve(request, 6)
        request.num_computed_tokens = [6]
        pages.leave(request)
    assert len(pool._roots) <= 2 * page_pool.FIRST_ROOTS and pool._roots["kept"] is pages.table(kept).root
    assert pages.known(Request([999, 1, 2, 3, 4, 5], tenant="tenant 999")) == 5


def test_prefixes_are_found() -> None:
    assert random_runs() > 1000
    without, few, many = (crowded_runs(count) for count in (0, 4, 40))
    assert without + 100 < few and few + 100 < many


def freed_while_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(self: PagePool, nodes: list[Node]) -> None:
        for node in nodes:
            self.num_held -= 1
            node.num_users = 1
        right(self, nodes)
        self.num_held += len(nodes)

    right = PagePool.release
    monkeypatch.setattr(PagePool, "release", release)


def a_page_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PagePool.match
    monkeypatch.setattr(PagePool, "match", lambda self, root, tokens, most: right(self, root, tokens, most + SIZE))


def a_row_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    right = page_pool.num_equal
    monkeypatch.setattr(page_pool, "num_equal", lambda first, second: min(right(first, second) + 1, len(first)))


def another_tenants_page(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PagePool.root
    monkeypatch.setattr(PagePool, "root", lambda self, tenant: right(self, ""))


def registers_what_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RankPages.register

    def register(self: RankPages[Any], request: Request, num_computed: int) -> None:
        right(self, request, min(len(self.table(request).pages) * SIZE, len(request.tokens)))

    monkeypatch.setattr(RankPages, "register", register)


def evicts_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "is_unused", property(lambda self: not self.children and self.parent is not None))


def goes_out_late(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: PagePool, count: int, after: int | None = None) -> list[int]:
        known = len(self.moves)
        taken = right(self, count, after)
        late, self.moves = self.moves[known:], self.moves[:known]
        self.moves = [*self.moves, *late[::-1]] if count < 2 else self.moves
        return taken

    right = PagePool.take
    monkeypatch.setattr(PagePool, "take", take)


def comes_back_from_a_page_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_pool, "PageIn", lambda host_page, page: PageIn(host_page ^ 1, page))


def goes_while_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Node, "is_last_in_host", property(lambda self: not self.is_resident and not self.children and self.parent)
    )


@pytest.mark.parametrize("fault", [goes_out_late, comes_back_from_a_page_too_far, goes_while_it_comes_back])
def test_mutants_of_host_memory(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        crowded_runs(4)


@pytest.mark.parametrize(
    "fault",
    [
        freed_while_shared,
        a_page_too_long,
        a_row_too_long,
        another_tenants_page,
        registers_what_is_not_computed,
        evicts_what_is_held,
    ],
)
def test_mutants(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        random_runs(1)


def test_the_least_recently_used_page_goes_first() -> None:
    model = Model(6)
    first, second = Request(list(range(9))), Request(list(range(10, 19)))
    for request in (first, second):
        model.enter(request)
        model.compute(request, 9)
        model.pages.leave(request)
    again = Request(list(range(9)))
    model.enter(again)  # the first is used once more
    assert again.num_computed_tokens == [8]
    model.pages.leave(again)
    model.enter(third := Request(list(range(20, 29))))
    model.compute(third, 9)
    assert model.pages.held(Request(list(range(9)))) == 8
    assert model.pages.held(Request(list(range(10, 19)))) < 8


def test_neighbouring_pages_are_taken_where_they_are_free() -> None:
    pool = PagePool(16, SIZE)
    first, second = pool.take(3), pool.take(4)
    assert (first, second) == ([0, 1, 2], [3, 4, 5, 6])
    for page in first:
        pool.give_back(page)
    assert pool.take(5) == [7, 8, 9, 10, 11]
    assert pool.take(2, after=6) == [0, 1]
    assert pool.take(5) == [12, 13, 14, 15, 2]
    with pytest.raises(IndexError):
        pool.take(1)


def test_room_is_kept_for_requests_to_grow() -> None:
    model = Model(24)
    for start in (0, 20, 40):
        request = Request([start, start + 1, start + 2], num_left=20)
        model.enter(request)
        model.compute(request, 3)
    for _ in range(4):
        for request in model.pages.running:
            request.tokens += [90, 91, 92, 93]
            model.compute(request, 4)
    tables = [model.pages.table(request).pages for request in model.pages.running]
    assert all(table == list(range(table[0], table[0] + len(table))) for table in tables), tables
