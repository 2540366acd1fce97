"""PrefixCache: which computed blocks hold which tokens, so that they are not computed again.

The name of a full block is blake2b over the name of the block before it and its own token ids.
The chain starts at a `PrefixKey`, which says what else shapes keys and values, and which callers
may share them. So equal names mean equal content.
"""

import struct
from array import array
from hashlib import blake2b
from typing import NamedTuple

from configs.wire.adapters import AdapterKey
from scheduler.kv.block_pool import BlockPool
from scheduler.request import Request

DIGEST_BYTES = 16


class PrefixKey(NamedTuple):
    """What must be equal for two requests to share blocks, beside the tokens.

    Nothing else decides it: a new kind of KV cache group would be one more field.
    salt: the caller's (`GenerateRequest.cache_salt`).
    rope_set: that of position 0, which decides those of later positions (configs/rope_sets.py).
    adapter: its key, one for each content digest; None is the base model.
    """

    salt: bytes
    rope_set: int
    adapter: AdapterKey | None

    @classmethod
    def of(cls, request: Request) -> "PrefixKey":
        """The key of a request's blocks."""
        return cls(request.cache_salt, request.rope_set, request.adapter)

    @property
    def root(self) -> bytes:
        """Where the chains of this key start."""
        fixed = struct.pack("<qq", self.rope_set, self.adapter or 0)
        return blake2b(fixed + self.salt, digest_size=DIGEST_BYTES).digest()


def extend_chain(request: Request, num_blocks: int, block_size: int) -> list[bytes]:
    """The digests of the request's first `num_blocks` full blocks; computes missing ones."""
    # They depend on the tokens and the key alone, so a preempted request keeps them.
    digests = request.digests
    assert num_blocks * block_size <= len(request.tokens), (num_blocks, len(request.tokens))
    for index in range(len(digests), num_blocks):
        parent = digests[-1] if digests else PrefixKey.of(request).root
        ids = array("q", request.tokens[index * block_size : (index + 1) * block_size])
        digests.append(blake2b(parent + ids.tobytes(), digest_size=DIGEST_BYTES).digest())
    return digests


class PrefixCache:
    """Digest → block for computed full blocks, over a pool that evicts the idle ones."""

    def __init__(self, num_blocks: int, block_size: int, enabled: bool) -> None:
        """If not enabled, nothing is found and nothing is kept."""
        self.enabled = enabled
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, self._forget)
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        """How many blocks can be found."""
        return len(self._block_of)

    def match(self, request: Request) -> list[int]:
        """The blocks that hold the request's first tokens; at least one token is left to compute.

        A request that still awaits a report about its prompt computes all of it: nothing is found.
        """
        if not self.enabled or request.awaits_report:
            return []
        # The last token is computed in any case: its logits give the next one.
        limit = (len(request.tokens) - 1) // self.block_size
        found = []
        for digest in extend_chain(request, limit, self.block_size)[:limit]:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def register(self, request: Request) -> None:
        """Make the request's full blocks findable up to `computed`: those that were applied."""
        full = request.computed // self.block_size
        if not self.enabled or full <= request.registered:
            return
        digests = extend_chain(request, full, self.block_size)
        for index in range(request.registered, full):
            digest, block = digests[index], request.blocks[index]
            # Two requests may compute the same tokens at once: the first block stays the one found.
            if digest not in self._block_of:
                self._block_of[digest] = block
                self._digest_of[block] = digest
                self.pool.keep(block)
        request.registered = full

    def check(self) -> None:
        """Assert that both directions of the map agree."""
        assert len(self._block_of) == len(self._digest_of)
        for digest, block in self._block_of.items():
            assert self._digest_of[block] == digest, block

    def _forget(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]
