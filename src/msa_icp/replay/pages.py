"""The page allocator: reference counts, shared prefixes, and a cache of pages that nobody uses now.

Every physical page is in exactly one of three places: *free* (holds nothing), *in use* (one reference
for each request that has it in its block table) or *idle* (no references, but its contents can still
be found by key). A page with a key holds prompt tokens only and is shared by all requests whose prompt
is the same up to and including that page; a page without one is private to its request.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence


class PageAllocator:
    """Hands out the pages of `pages`, in that order at first."""

    def __init__(self, pages: Iterable[int]) -> None:
        self._free = deque(pages)
        self._references: dict[int, int] = {}
        self._page_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest idle first
        self.reused = 0
        """Cached pages that were given up for new contents."""

    @property
    def available(self) -> int:
        """Pages that can be taken now: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def in_use(self) -> int:
        """Pages with at least one reference."""
        return len(self._references)

    def references(self, page: int) -> int:
        """Requests that hold `page`."""
        return self._references.get(page, 0)

    def cost(self, keys: Sequence[Hashable]) -> int:
        """By how many pages `acquire_shared(keys)` makes `available` smaller."""
        return sum(1 for key in keys if self.references(self._page_of.get(key, -1)) == 0)

    def acquire_shared(self, keys: Sequence[Hashable]) -> list[tuple[int, bool]]:
        """A page for each of the distinct `keys`, in order: `(page, fresh)`.

        A fresh page has still to be written; the others hold the contents of their key already.
        """
        self._require(self.cost(keys))
        # First hold what is there, so that the fresh pages are not taken from it.
        found = {key: self._page_of[key] for key in keys if key in self._page_of}
        for page in found.values():
            self._idle.pop(page, None)
            self._references[page] = self.references(page) + 1
        pages = []
        for key in keys:
            fresh = key not in found
            if fresh:
                page = self._take()
                self._page_of[key] = page
                self._key_of[page] = key
            else:
                page = found[key]
            pages.append((page, fresh))
        return pages

    def acquire_private(self) -> int:
        """A page that nobody else will get while it is held; its contents are left over from before."""
        self._require(1)
        return self._take()

    def release(self, pages: Iterable[int]) -> None:
        """Give back one reference to each page; of pages that become idle, the first is reused first."""
        for page in pages:
            if self.references(page) == 0:
                raise ValueError(f"page {page} is not in use")
            self._references[page] -= 1
            if self._references[page] == 0:
                del self._references[page]
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def _require(self, pages: int) -> None:
        if pages > self.available:
            raise ValueError(f"{pages} pages are wanted, {self.available} are available")

    def _take(self) -> int:
        if self._free:
            page = self._free.popleft()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            self.reused += 1
        self._references[page] = 1
        return page
