"""AdapterPages: the device slots and the pages of each projection's pool, free or taken."""

from collections.abc import Iterable, Sequence


class AdapterPages:
    """Slots 0 .. num_slots - 1 and, for projection i, pages 0 .. num_pages[i] - 1."""

    def __init__(self, num_pages: Sequence[int], num_slots: int) -> None:
        self.num_pages = tuple(num_pages)
        self.num_slots = num_slots
        self._slots = list(range(num_slots - 1, -1, -1))
        self._pages = [list(range(count - 1, -1, -1)) for count in self.num_pages]

    def fits(self, counts: Sequence[int], extra_slots: int, extra_pages: Sequence[int]) -> bool:
        """Whether an adapter of `counts` pages fits, if these extras were free as well."""
        if len(self._slots) + extra_slots < 1:
            return False
        rows = zip(self._pages, counts, extra_pages, strict=True)
        return all(len(free) + extra >= count for free, count, extra in rows)

    def allocate(self, counts: Sequence[int]) -> tuple[int, list[list[int]]]:
        """Take a slot and `counts[i]` pages of projection i, the lowest first."""
        pages = []
        for free, count in zip(self._pages, counts, strict=True):
            assert count <= len(free), (count, len(free))
            # An adapter's pages are read best where they are neighbours.
            free.sort(reverse=True)
            pages.append([free.pop() for _ in range(count)])
        return self._slots.pop(), pages

    def release(self, slot: int, pages: Sequence[Sequence[int]]) -> None:
        """Give back what `allocate` gave."""
        self._slots.append(slot)
        for free, taken in zip(self._pages, pages, strict=True):
            free.extend(taken)

    def check(self, slots: Iterable[int], pages: Iterable[Sequence[Sequence[int]]]) -> None:
        """Assert that every slot and page is free or taken exactly once."""
        assert sorted([*self._slots, *slots]) == list(range(self.num_slots)), "slots"
        taken = list(pages)
        for index, free in enumerate(self._pages):
            found = sorted([*free, *(page for each in taken for page in each[index])])
            assert found == list(range(self.num_pages[index])), f"pages of projection {index}"
