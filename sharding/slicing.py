"""Which indices of a whole tensor belong to one rank: pure arithmetic, no tensors."""

from dataclasses import dataclass

Segments = tuple[tuple[int, int], ...]
"""Ranges (start, stop) of the checkpoint's indices, concatenated in this rank's order."""


def width(segments: Segments) -> int:
    """Return how many indices the segments hold."""
    return sum(stop - start for start, stop in segments)


def whole(size: int) -> Segments:
    """Return all indices of a dimension of `size`."""
    return ((0, size),)


def even_cut(size: int, rank: int, ranks: int, what: str) -> Segments:
    """Return this rank's equal share of `size` indices; ValueError if ranks do not divide it."""
    if size % ranks:
        raise ValueError(
            f"{what} ({size}) cannot be cut evenly over tensor_parallel = {ranks} ranks: "
            f"set tensor_parallel to a divisor of {size}"
        )
    share = size // ranks
    return ((rank * share, (rank + 1) * share),)


LINE = 64
"""Indices that a cut keeps together where it can: kernels read whole lines."""


def cut_width(size: int, rank: int, ranks: int, what: str) -> Segments:
    """Return this rank's share of a feed-forward's `size` inner columns: equal, or nearly so.

    Shares may differ: the ranks exchange the layer's outputs, which have one width for all.
    Raises ValueError if a rank would have none.
    """
    if size % ranks == 0:
        return even_cut(size, rank, ranks, what)
    if size < ranks:
        raise ValueError(
            f"{what} ({size}) is less than tensor_parallel = {ranks} ranks: lower tensor_parallel"
        )
    # Shorter lines where there are few of them: shares may then differ by a quarter at most.
    line = LINE
    while line > 1 and size < 4 * ranks * line:
        line //= 2
    lines = -(-size // line)
    first, last = (lines * each // ranks * line for each in (rank, rank + 1))
    return ((first, min(last, size)),)


def spread_experts(count: int, rank: int, ranks: int) -> range:
    """Return this rank's whole experts, of `count`: equally many on each rank, or one more.

    Raises ValueError if a rank would have none.
    """
    if count < ranks:
        raise ValueError(
            f"expert_parallel: {count} experts are less than tensor_parallel = {ranks} ranks: "
            "lower tensor_parallel, or remove expert_parallel"
        )
    return range(count * rank // ranks, count * (rank + 1) // ranks)


@dataclass(frozen=True)
class HeadCut:
    """One rank's attention heads.

    num_heads, num_kv_heads: how many this rank has (several ranks may have the same KV head).
    queries, keys: this rank's columns of the query and of the key (and value) projections.
    """

    num_heads: int
    num_kv_heads: int
    queries: Segments
    keys: Segments


def cut_heads(num_heads: int, num_kv_heads: int, head_dim: int, rank: int, ranks: int) -> HeadCut:
    """Cut query heads evenly; cut KV heads too, or replicate them when there are fewer than ranks.

    A rank always gets the KV heads that its own query heads read. Raises ValueError if the number
    of ranks fits neither head count.
    """
    ((first, last),) = even_cut(num_heads, rank, ranks, "num_attention_heads")
    if num_kv_heads % ranks and ranks % num_kv_heads:
        raise ValueError(
            f"num_key_value_heads ({num_kv_heads}) can be neither cut nor replicated over "
            f"tensor_parallel = {ranks} ranks: one of the two must be a multiple of the other"
        )
    share = max(1, num_kv_heads // ranks)  # With fewer KV heads than ranks, neighbours share one.
    kv_first = rank * num_kv_heads // ranks
    return HeadCut(
        num_heads=last - first,
        num_kv_heads=share,
        queries=((first * head_dim, last * head_dim),),
        keys=((kv_first * head_dim, (kv_first + share) * head_dim),),
    )


def fused_heads(
    queries: Segments,
    keys: Segments,
    head_dim: int,
    sizes: tuple[int, int] = (1, 1),
    order: str = "qkv",
) -> Segments:
    """Return a rank's rows of one product of q, k and v, in the order q, k, v.

    queries, keys: one run of columns each, of q and of k alone. The product lies in blocks, each of
    some heads' q, k and v. sizes: query heads and KV heads of a block. order: of the three in it.
    """
    counts = {"q": sizes[0], "k": sizes[1], "v": sizes[1]}
    height = sum(counts.values())
    rows: list[int] = []
    for part, ((start, stop),) in zip("qkv", (queries, keys, keys), strict=True):
        before = sum(counts[each] for each in order[: order.index(part)])
        for head in range(start // head_dim, stop // head_dim):
            block, inside = divmod(head, counts[part])
            rows.append(block * height + before + inside)
    starts = [at for at, row in enumerate(rows) if not at or row != rows[at - 1] + 1]
    ends = [*starts[1:], len(rows)]
    return tuple(
        (rows[first] * head_dim, (rows[last - 1] + 1) * head_dim)
        for first, last in zip(starts, ends, strict=True)
    )


@dataclass(frozen=True)
class VocabularyCut:
    """One rank's rows of the vocabulary, which is padded to a multiple of the ranks.

    start, stop: the rank's real token ids (stop == start where all of its rows are padding).
    num_rows: rows that the rank holds, the same on every rank.
    """

    start: int
    stop: int
    num_rows: int

    @property
    def rows(self) -> Segments:
        """Return the rank's real rows."""
        return ((self.start, self.stop),)


def cut_vocabulary(vocab_size: int, rank: int, ranks: int) -> VocabularyCut:
    """Cut the vocabulary into equal ranges; the last ranks' ranges may end in padding."""
    share = -(-vocab_size // ranks)
    start = min(rank * share, vocab_size)
    return VocabularyCut(start, min(start + share, vocab_size), share)
