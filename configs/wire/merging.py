"""The rule by which a request's adapters are merged into one, and the digest of a merge."""

import hashlib
from collections.abc import Sequence
from enum import StrEnum

import msgspec


class MergeStrategy(StrEnum):
    """How the factors of several adapters become one; the names are LoRAX's and PEFT's."""

    LINEAR = "linear"
    TIES = "ties"
    DARE_LINEAR = "dare_linear"
    DARE_TIES = "dare_ties"


class SignMethod(StrEnum):
    """How the sign of a value is elected: by the sum of the adapters' values, or of their signs."""

    TOTAL = "total"
    FREQUENCY = "frequency"


class MergeRule(msgspec.Struct, frozen=True):
    """How the parts of a merge are combined, in their order.

    weights: one for each part.
    density: the fraction of each part's values that is kept, in (0, 1]; unused by LINEAR.
    sign_method: used by TIES and DARE_TIES.
    """

    weights: tuple[float, ...]
    strategy: MergeStrategy = MergeStrategy.LINEAR
    density: float = 1.0
    sign_method: SignMethod = SignMethod.TOTAL

    @property
    def prunes(self) -> bool:
        """Whether values are left out, so that `density` has an effect."""
        return self.strategy is not MergeStrategy.LINEAR

    @property
    def elects_signs(self) -> bool:
        """Whether signs are elected, so that `sign_method` has an effect."""
        return self.strategy in (MergeStrategy.TIES, MergeStrategy.DARE_TIES)

    def normalised(self) -> "MergeRule":
        """The rule with defaults in fields without effect; equal merges have equal rules."""
        strategy = self.strategy if len(self.weights) > 1 else MergeStrategy.LINEAR
        weights = tuple(map(float, self.weights))
        rule = MergeRule(weights, strategy)
        return MergeRule(
            weights,
            strategy,
            self.density if rule.prunes else 1.0,
            self.sign_method if rule.elects_signs else SignMethod.TOTAL,
        )

    def digest(self, parts: Sequence[str]) -> str:
        """The digest of a merge of parts with these digests, in hexadecimal digits."""
        assert len(parts) == len(self.weights), (parts, self.weights)
        recipe = msgspec.json.encode((list(parts), self.normalised()))
        return hashlib.blake2b(recipe, digest_size=20, person=b"loray merge").hexdigest()
