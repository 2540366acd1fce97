"""How adapters are merged into one for a request, and which merges are equal."""

import hashlib
from collections.abc import Sequence
from enum import StrEnum

import msgspec


class MergeStrategy(StrEnum):
    """How factors of several adapters become one; by LoRAX's names, and PEFT's."""

    LINEAR = "linear"
    TIES = "ties"
    DARE_LINEAR = "dare_linear"
    DARE_TIES = "dare_ties"


class SignMethod(StrEnum):
    """What elects the sign of a value: the sum of the adapters' values, or of their signs."""

    TOTAL = "total"
    FREQUENCY = "frequency"


class MergeRule(msgspec.Struct, frozen=True):
    """What to do with the parts of a merge, in their order.

    weights: one a part. density: the fraction of each part's values that is kept, in (0, 1].
    """

    weights: tuple[float, ...]
    strategy: MergeStrategy = MergeStrategy.LINEAR
    density: float = 1.0
    sign_method: SignMethod = SignMethod.TOTAL

    @property
    def prunes(self) -> bool:
        """Whether values are left out, so that `density` counts."""
        return self.strategy is not MergeStrategy.LINEAR

    @property
    def elects_signs(self) -> bool:
        """Whether signs are elected, so that `sign_method` counts."""
        return self.strategy in (MergeStrategy.TIES, MergeStrategy.DARE_TIES)

    def normalised(self) -> "MergeRule":
        """The rule without fields that do not count; equal merges have equal ones."""
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
        """Name the content of a merge of parts with these digests, as hexadecimal digits."""
        assert len(parts) == len(self.weights), (parts, self.weights)
        recipe = msgspec.json.encode((list(parts), self.normalised()))
        return hashlib.blake2b(recipe, digest_size=20, person=b"loray merge").hexdigest()
