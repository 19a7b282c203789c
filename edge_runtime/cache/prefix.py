"""The prefix index: token prefixes that are in the cache, and the order in which their pages are evicted."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from nearfar.edge_runtime.cache.windows import Window

Key = tuple[int, ...] | str
"""The tokens of a page; at the root of a tree, the salt."""


def common_length(a: Seq[int], b: Seq[int]) -> int:
    """The length of the common beginning of two token sequences."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


@dataclass(eq=False, slots=True)
class Node:
    """The tokens of one page after those of its parents, and by group the page with their keys and values.

    The path from the root names every earlier token, so it determines the content of a node's pages. A node
    lives as long as it has a page, a child, or sequences whose published tokens end at it (`ends` counts
    them).
    """

    parent: Node | None
    key: Key
    pages: list[int | None]
    children: dict[Key, Node] = field(default_factory=dict)
    ends: int = 0


class PrefixIndex:
    """Trees of full pages, one tree for each salt: a tenant's tree never leads to pages of another tenant.

    A prefix is found if every group can serve it: a group without a window must have all of its pages, a
    group with a window those that the next row reads. So pages of a windowed group may leave the index before
    later pages do. In a group without a window a page never leaves before its children: a sequence that holds
    a child holds its parent, sequences release pages from the last to the first, and the page that became
    idle first is evicted first.
    """

    def __init__(self, windows: Seq[Window]) -> None:
        self._windows = windows
        self._page_size = windows[0].page_size
        self._top = self._node(None, "")  # the node whose children are the roots, by salt
        self._nodes: list[dict[int, Node]] = [{} for _ in windows]
        # idle pages of each group; insertion order is eviction order
        self._idle: list[dict[int, None]] = [{} for _ in windows]

    def __contains__(self, place: tuple[int, int]) -> bool:
        """Whether the index has a page, given as (group, page)."""
        group, page = place
        return page in self._nodes[group]

    def idle_count(self, group: int = 0) -> int:
        """The number of pages of a group that `evict` can free."""
        return len(self._idle[group])

    def idle_pages(self, group: int = 0) -> list[int]:
        """The idle pages of a group in the order in which they will be evicted."""
        return list(self._idle[group])

    def nodes(self) -> Iterator[tuple[str, tuple[int, ...], Node]]:
        """Yield (salt, tokens from the root, node) for every node with a page, parents before children."""
        reached: list[tuple[str, tuple[int, ...], Node]] = []
        reached += [(salt, (), root) for salt, root in self._top.children.items() if isinstance(salt, str)]
        while reached:
            salt, path, node = reached.pop()
            if any(page is not None for page in node.pages):
                yield salt, path, node
            reached += [
                (salt, path + key, child) for key, child in node.children.items() if isinstance(key, tuple)
            ]

    def root(self, salt: str = "") -> Node:
        """The node before the first page of a sequence with this salt."""
        return self._child(self._top, salt)

    def lookup(self, tokens: Seq[int], limit: int, salt: str = "") -> list[Node]:
        """The nodes, at most `limit`, of the longest prefix in the salt's tree that every group can serve."""
        found: list[Node] = []
        size, served = self._page_size, 0
        # for each group, the number of pages without a gap at the end of `found`
        cached = [0] * len(self._windows)
        node = self._top.children.get(salt)
        while node is not None and len(found) < limit:
            start = len(found) * size
            node = node.children.get(tuple(tokens[start : start + size]))
            if node is None:
                break
            found.append(node)
            end = len(found) * size
            cached = [
                0 if page is None else before + 1 for before, page in zip(cached, node.pages, strict=True)
            ]
            if all(have >= w.columns_before(end) for have, w in zip(cached, self._windows, strict=True)):
                served = len(found)
        return found[:served]

    def insert(self, parent: Node, tokens: Seq[int], pages: Seq[int | None]) -> Node:
        """Enter a full page of each group that has one. A page that the node already has stays: see its
        `pages`.
        """
        node = self._child(parent, tuple(tokens))
        for group, page in enumerate(pages):
            if page is not None and node.pages[group] is None:
                node.pages[group] = page
                self._nodes[group][page] = node
        return node

    def enter(self, node: Node) -> Node:
        """Count one more sequence whose published tokens end at the node."""
        node.ends += 1
        return node

    def leave(self, node: Node) -> None:
        """Count one sequence less, and drop the node if nothing needs it."""
        node.ends -= 1
        self._prune(node)

    def park(self, group: int, page: int) -> None:
        """Mark a page that no sequence holds as idle: it may be evicted, after those parked before it."""
        self._idle[group][page] = None

    def revive(self, group: int, page: int) -> None:
        """Take a page that is held again from the idle pages."""
        self._idle[group].pop(page, None)

    def evict(self, group: int) -> int:
        """Forget the page of a group that was idle longest and return it. The caller has checked
        `idle_count`.
        """
        page = next(iter(self._idle[group]))
        del self._idle[group][page]
        node = self._nodes[group].pop(page)
        node.pages[group] = None
        self._prune(node)
        return page

    def clear(self) -> None:
        """Forget every page. The caller has evicted the idle ones; the others are freed when they are
        released.
        """
        for group, nodes in enumerate(self._nodes):
            for node in nodes.values():
                node.pages[group] = None
            nodes.clear()
        self._top = self._node(None, "")

    def _node(self, parent: Node | None, key: Key) -> Node:
        return Node(parent, key, [None] * len(self._windows))

    def _child(self, parent: Node, key: Key) -> Node:
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = self._node(parent, key)
        return node

    def _prune(self, node: Node) -> None:
        """Drop a node that nothing needs, and then parents that led only to it."""
        while node.parent is not None and not (
            node.ends or node.children or any(p is not None for p in node.pages)
        ):
            node.parent.children.pop(node.key, None)
            node = node.parent
