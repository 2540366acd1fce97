"""Adapters merged into one at staging: factor by factor, on whole tensors, before any cut.

For the parts i at a position, with weights w_i and their own scalings s_i (alpha / r, or rsLoRA's):

    A = merge_i(sign(w_i s_i) sqrt|w_i s_i|, A_i)        B = merge_i(sqrt|w_i s_i|, B_i)

and the merged adapter has the scaling 1, as PEFT's add_weighted_adapter has it. The A are merged
among themselves and the B among themselves, so B A is not the weighted sum of the B_i A_i. With
values v_i of one element, and m_i for whether part i keeps it:

    linear       sum_i c_i v_i
    ties         sum_i c_i m_i v_i [sign agrees] / number of parts that agree in sign
    dare_linear  sum_i c_i m_i v_i / density
    dare_ties    as ties, on m_i v_i / density

TIES (arXiv:2306.01708) keeps each tensor's largest magnitudes and takes the sign that the parts
elect. DARE (arXiv:2311.03099) keeps values at random and rescales them. Ranks below the largest at
a position are padded with zeros first. A position that some parts lack is merged over the others.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import copysign, sqrt
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from configs.wire.adapters import AdapterError, FetchedAdapter
from configs.wire.merging import MergeRule, MergeStrategy, SignMethod
from modeling.adapters.expert_pages import ExpertPages
from modeling.adapters.faults import refuse
from modeling.adapters.peft.adapter import PeftAdapter, reading
from modeling.adapters.peft.ends import Matrix
from modeling.adapters.peft.folder import open_adapter
from modeling.adapters.peft.joined import JoinedPlan
from modeling.adapters.peft.recipes import Recipes
from modeling.adapters.peft.tensors import check_finite
from modeling.adapters.projection import BaseRows, ModulePosition, Projection
from modeling.adapters.stacks import LoraModule, LoraStack
from sharding.extents import Scratch


@dataclass(frozen=True)
class _Part:
    """One adapter of a merge.

    name, weight: as the merge's rule has them.
    adapter: its open files.
    modules: its module paths by position.
    """

    name: str
    weight: float
    adapter: PeftAdapter
    modules: dict[ModulePosition, str]


@dataclass(frozen=True)
class _Term:
    """One part's factors at a position.

    scale: its weight times its scaling.
    a, b: its factors, padded to the merge's rank.
    seeds: of the random masks of a and b.
    """

    scale: float
    a: Tensor
    b: Tensor
    seeds: tuple[int, int]


@dataclass(frozen=True)
class MergedAdapter:
    """A merge that passed all checks, read as one adapter.

    parts: its adapters.
    rule: how they are merged.
    digest: the merge's; random masks are seeded with it.
    """

    parts: tuple[_Part, ...]
    rule: MergeRule
    digest: str
    is_scaled = False
    is_biased = False
    expert_pages: ClassVar[Mapping[int, ExpertPages]] = MappingProxyType({})

    @property
    def ranks(self) -> dict[ModulePosition, int]:
        """Return each adapted position's true rank, its parts' largest, in the model's order."""
        ranks: dict[ModulePosition, int] = {}
        for part in self.parts:
            for position, rank in part.adapter.ranks.items():
                ranks[position] = max(rank, ranks.get(position, 0))
        return {p: ranks[p] for p in sorted(ranks, key=lambda p: (p.projection, p.layer))}

    def read(self) -> Iterator[LoraModule]:
        """Yield the merged modules one by one; refuses values that are not finite."""
        for stack in self.stacks():
            yield from stack.modules()

    def stacks(self, scratch: Scratch | None = None) -> Iterator[LoraStack]:
        """Yield stacks of one module; each is merged by itself, in new memory."""
        for part in self.parts:
            with _named(part.name), reading():
                part.adapter.ends.check_copies(part.adapter.file)
        for position, rank in self.ranks.items():
            module = self._merge(position, rank)
            yield LoraStack(position.projection, (position.layer,), module.a[None], module.b[None])

    def read_matrices(self) -> Iterator[Matrix]:
        """Yield nothing: parts with whole matrices are refused."""
        return iter(())

    def _merge(self, position: ModulePosition, rank: int) -> LoraModule:
        terms = [
            self._term(index, position, rank)
            for index, part in enumerate(self.parts)
            if position in part.modules
        ]
        # B takes no sign: that of w_i s_i must count once in the product B A.
        signed = [copysign(sqrt(abs(term.scale)), term.scale) for term in terms]
        plain = [sqrt(abs(term.scale)) for term in terms]
        a = combine([t.a for t in terms], signed, self.rule, [t.seeds[0] for t in terms])
        b = combine([t.b for t in terms], plain, self.rule, [t.seeds[1] for t in terms])
        for factor in (a, b):
            check_finite("the merge (are its weights too large?)", factor)
        return LoraModule(position, a, b)

    def _term(self, index: int, position: ModulePosition, rank: int) -> _Term:
        part = self.parts[index]
        module = part.modules[position]
        with _named(part.name):
            a, b = part.adapter.factors(module)
        missing = rank - len(a)  # Zero rows of A and columns of B add nothing to B A.
        projection = part.adapter.projections[position.projection]
        # The same on every rank and at every staging, so that all draw the same masks.
        seed_text = f"{self.digest}:{index}:{projection.module.format(layer=position.layer)}"
        return _Term(
            scale=part.weight * part.adapter.plan.scaling_of(module),
            a=pad(a, (0, 0, 0, missing)),
            b=pad(b, (0, missing)),
            seeds=(_seed(f"{seed_text}:A"), _seed(f"{seed_text}:B")),
        )


OpenAdapter = PeftAdapter | MergedAdapter


def open_fetched(
    adapter: FetchedAdapter,
    projections: Sequence[Projection],
    max_rank: int,
    base: Mapping[str, BaseRows] = MappingProxyType({}),
    recipes: Recipes | None = None,
) -> OpenAdapter:
    """Check an adapter's files, or those of all parts of a merge; AdapterError names the part.

    base, recipes: as in `open_adapter`.
    """
    if adapter.rule is None:
        return _open(adapter, projections, max_rank, base, recipes)
    rule = adapter.rule.normalised()
    parts = []
    for member, weight in zip(adapter.parts, rule.weights, strict=True):
        with _named(member.name):
            opened = _open(member, projections, max_rank, base, recipes)
            _check_factors_alone(opened)
        modules = {position: module for module, position in opened.modules.items()}
        parts.append(_Part(member.name, weight, opened, modules))
    return MergedAdapter(tuple(parts), rule, adapter.digest)


def _open(
    adapter: FetchedAdapter,
    projections: Sequence[Projection],
    max_rank: int,
    base: Mapping[str, BaseRows],
    recipes: Recipes | None,
) -> PeftAdapter:
    within = Path(adapter.root) if adapter.root else None
    return open_adapter(Path(adapter.folder), projections, max_rank, base, within, recipes)


def _check_factors_alone(adapter: PeftAdapter) -> None:
    if adapter.score is not None:
        refuse(
            "it brings a classification head, and heads cannot be merged: use it alone, or merge "
            "it in PEFT and serve the result"
        )
    if adapter.heads is not None:
        refuse("it brings Medusa heads, which cannot be merged: use it alone, or remove them")
    if adapter.plan.invocation:
        refuse("it is an activated adapter (aLoRA), which PEFT does not merge: use it alone")
    if adapter.tokens:
        refuse("trainable_token_indices: PEFT does not merge rows of single tokens: use it alone")
    if adapter.norms.vectors or adapter.whole.modules:
        refuse("it brings whole modules (modules_to_save), which are not merged: use it alone")
    if adapter.plan.parts or isinstance(adapter.plan, JoinedPlan):
        refuse("it adapts fused modules, or parts of those that this model fuses: use it alone")
    if adapter.experts.ranks:
        refuse("it adapts routed experts, which is not served in merges: use it alone")
    if adapter.plan.parameters.names:
        refuse("target_parameters: PEFT does not merge adapters of bare parameters: use it alone")
    if adapter.plan.use_dora:
        refuse("use_dora=True: magnitudes of DoRA cannot be merged, PEFT drops them: use it alone")
    if adapter.is_biased:
        refuse("it holds biases (bias or lora_bias), which PEFT does not merge: use it alone")
    if adapter.ends.matrices:
        refuse(
            f"it holds whole matrices ({', '.join(adapter.ends.matrices)}), which cannot be "
            "merged: use it alone, or retrain it without modules_to_save"
        )


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Add the part's name to an AdapterError."""
    try:
        yield
    except AdapterError as error:
        message = f"adapter {name!r} of the merge: {error.message}"
        raise AdapterError(error.refusal, message) from error


def combine(
    tensors: Sequence[Tensor], scales: Sequence[float], rule: MergeRule, seeds: Sequence[int]
) -> Tensor:
    """Merge float32 tensors of one shape; a scale and a seed for each (see the module's table)."""
    if rule.prunes:
        tensors = [prune(t, rule, seed) for t, seed in zip(tensors, seeds, strict=True)]
    stacked = torch.stack(list(tensors))
    scaled = stacked * torch.tensor(scales).view(-1, *[1] * (stacked.dim() - 1))
    if not rule.elects_signs:
        return scaled.sum(0)
    agrees = agreeing(stacked, rule.sign_method)
    return (scaled * agrees).sum(0) / agrees.sum(0).clamp(min=1)


def prune(tensor: Tensor, rule: MergeRule, seed: int) -> Tensor:
    """Keep the fraction rule.density of the values: the largest, or random ones, rescaled."""
    if rule.density >= 1:
        return tensor
    if rule.strategy is MergeStrategy.TIES:
        count = int(rule.density * tensor.numel())
        kept = torch.topk(tensor.abs().flatten(), count, sorted=False).indices
        mask = torch.zeros(tensor.numel()).index_fill_(0, kept, 1.0)
        return tensor * mask.view(tensor.shape)
    # On the CPU and with a generator of its own: every rank and replica draws the same mask.
    generator = torch.Generator().manual_seed(seed)
    mask = torch.bernoulli(torch.full(tensor.shape, rule.density), generator=generator)
    return tensor * mask / rule.density


def agreeing(stacked: Tensor, method: SignMethod) -> Tensor:
    """Return where each of [parts, ...] has the sign that the parts elect; False for zeros."""
    # A zero's sign is 0, which never equals the elected 1 or -1: pruned values do not take part.
    signs = stacked.sign()
    ballot = stacked if method is SignMethod.TOTAL else signs
    elected = torch.where(ballot.sum(0) >= 0, 1, -1)
    return signs == elected


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
