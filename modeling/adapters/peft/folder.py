"""Read a PEFT LoRA folder for a model's projections: served exactly, or refused with reasons."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from configs.wire.adapters import AdapterRefusal
from modeling.adapters.faults import Faults, refuse
from modeling.adapters.peft.activation import check_activation
from modeling.adapters.peft.adapter import PeftAdapter, reading
from modeling.adapters.peft.biases import find_biases
from modeling.adapters.peft.config import LoraPlan, check_config
from modeling.adapters.peft.dora import check_magnitudes, magnitude_key
from modeling.adapters.peft.ends import (
    INSIDE_ONLY_ADVICE,
    PREFIX,
    WEIGHT_SUFFIX,
    check_tying,
    find_ends,
    is_tied,
)
from modeling.adapters.peft.experts import find_experts
from modeling.adapters.peft.factor_names import check_found, factor_names
from modeling.adapters.peft.fused import find_parts
from modeling.adapters.peft.heads import find_heads
from modeling.adapters.peft.joined import join_parts
from modeling.adapters.peft.names import WEIGHTS_NAME, open_tensors, use_peft_names
from modeling.adapters.peft.norms import find_norms, without_norms
from modeling.adapters.peft.other_parts import leave_idle_modules, leave_other_parts
from modeling.adapters.peft.recipes import Recipes
from modeling.adapters.peft.score import SCORE_KEY, find_score, without_score
from modeling.adapters.peft.tensors import FLOATS, check_file_rank, check_shape, check_type
from modeling.adapters.peft.tokens import find_tokens
from modeling.adapters.peft.whole import find_whole, trained_biases, without_whole
from modeling.adapters.projection import (
    TOKEN_KINDS,
    WHOLE_KINDS,
    BaseRows,
    ModulePosition,
    Projection,
    ProjectionKind,
)
from sharding.tensor_file import TensorFile

FACTOR = ".lora_"
"""Part of the names of all tensors that are not the base model's."""
IDLE_SUFFIXES = (".lora_velora_embed",)
"""Suffixes of tensors that only a backward pass reads."""

SETTING_ADVICE = (
    "start the server with adapters.vocabulary true (LoRA factors only), retrain with "
    "target_modules inside the layers or, where the server's log says that adapters cannot change "
    "this model's embedding and head, merge the adapter into the base model"
)
MAX_UNKNOWN = 64
"""Most unknown tensors that a refusal examines; a file may hold any number of them."""

ENDS = frozenset(
    {"embed_tokens", "lm_head", "embed_in", "embed_out", "wte", "word_embeddings"}
    | {"tok_embeddings", "token_adapter"}
)
"""Names of embeddings and heads in models' module paths, and PEFT's of rows that it sets there."""
BEHIND_LAYERS = ENDS | {"pooler", "predictions"}
"""The same, and names of what other layers between the last one and the head are parts of."""


def open_adapter(
    folder: Path,
    projections: Sequence[Projection],
    max_rank: int,
    base: Mapping[str, BaseRows] = MappingProxyType({}),
    within: Path | None = None,
    recipes: Recipes | None = None,
) -> PeftAdapter:
    """Check a folder's config, tensor names, types and shapes; reads no weights yet.

    base: tensors of the model by their paths, of which the file may hold copies. within: the
    folder that links must not lead out of. recipes: those that passed these checks before.
    AdapterError names all that is wrong.
    """
    faults = Faults()
    plan, adapter = check_config(folder, faults, within), None
    with faults.gather(), reading():
        file = open_tensors(folder, within)
        if recipes is not None and plan is not None and not faults:
            adapter = recipes.find(plan, file)
        if plan is not None and adapter is None:
            use_peft_names(file)
            adapter = _check_file(file, plan, projections, base, max_rank)
            if recipes is not None and not faults:
                recipes.keep(adapter)
    with faults.gather(), reading():
        heads = find_heads(folder, projections, within)
    faults.check()
    assert adapter is not None
    return replace(adapter, heads=heads)


def _check_file(
    file: TensorFile,
    plan: LoraPlan,
    projections: Sequence[Projection],
    base: Mapping[str, BaseRows],
    max_rank: int,
) -> PeftAdapter:
    """Check a file against its config and the model; base: as in `open_adapter`."""
    known = {
        module: ModulePosition(index, layer)
        for index, projection in enumerate(projections)
        if projection.kind.has_factors
        for layer in range(projection.num_layers)
        for module in projection.modules(layer)
    }
    has_idle = leave_other_parts(file, known, projections)
    leave_idle_modules(file, projections)
    file, plan = join_parts(file, plan, known, projections)
    named = {key[len(PREFIX) : key.rfind(FACTOR)] for key in [*file.keys()] if FACTOR in key}
    plan = replace(plan, parts=find_parts(named, known, projections))
    found = find_biases(file.keys(), plan, known)
    adapter = PeftAdapter(file, plan, known, tuple(projections), biases=found, has_idle=has_idle)
    faults = Faults()
    adapter = _find_others(adapter, base, faults)
    adapter = replace(adapter, modules=_match(file.keys(), adapter, faults))
    alone = adapter.biases.alone(adapter.modules)
    adapter = replace(adapter, bare={module: known[module] for module in alone})
    _check_tensors(adapter, faults)
    # It compares values, so types and shapes must be right.
    if not faults:
        with faults.gather():
            check_tying(file, plan, projections, adapter.modules)
    with faults.gather():
        _check_ranks(adapter, max_rank)
    with faults.gather():
        check_found(adapter.modules, adapter.projections)
    with faults.gather():
        _check_once(adapter)
    with faults.gather():
        _check_parts(plan)
    with faults.gather():
        _check_targets(adapter, known)
    with faults.gather():
        adapter.biases.check(file, plan, adapter.modules, known, projections)
    with faults.gather():
        has_whole = bool(adapter.ends.matrices or adapter.tokens or adapter.norms.vectors)
        has_whole |= adapter.score is not None or bool(adapter.whole.modules)
        check_activation(plan, adapter.projections, adapter.modules.values(), has_whole)
    faults.check()
    return adapter


def _find_others(adapter: PeftAdapter, base: Mapping[str, BaseRows], faults: Faults) -> PeftAdapter:
    """Find what the file holds besides factors; adapter: with all adaptable modules."""
    file, plan, projections, keys = (
        adapter.file,
        adapter.plan,
        adapter.projections,
        adapter.file.keys(),
    )
    with faults.gather():
        adapter = replace(adapter, score=find_score(file, plan, projections))
    with faults.gather():
        adapter = replace(adapter, tokens=find_tokens(file, plan, projections))
    with faults.gather():
        adapter = replace(adapter, experts=find_experts(file, plan, projections))
    plan = without_score(plan, keys)
    with faults.gather():
        adapter = replace(adapter, norms=find_norms(file, plan, projections, adapter.modules))
    plan = without_norms(plan, adapter.norms)
    with faults.gather():
        adapter = replace(adapter, whole=find_whole(file, plan, projections, adapter.modules))
    with faults.gather():
        adapter.whole.check(file, projections)
        biases = {**adapter.biases.replaced, **trained_biases(adapter.whole, file)}
        adapter = replace(adapter, biases=replace(adapter.biases, replaced=biases))
    plan = without_whole(plan, adapter.whole)
    with faults.gather():
        adapter = replace(adapter, ends=find_ends(keys, plan, projections, base))
    return adapter


def _check_tensors(adapter: PeftAdapter, faults: Faults) -> None:
    """Check the types and shapes of all tensors that were found."""
    file = adapter.file
    with faults.gather():
        adapter.ends.check(file, adapter.projections)
    for module, position in adapter.modules.items():
        names, rank = adapter.names(module), adapter.plan.rank_of(module)
        projection = adapter.projections[position.projection]
        shape_a, shape_b = names.shapes(file)
        right_a, right_b = (rank, projection.in_features), (projection.out_features, rank)
        for key, shape, right in ((names.a, shape_a, right_a), (names.b, shape_b, right_b)):
            if shape == right and file.dtype(key) in FLOATS:
                continue
            is_a = right is right_a
            with faults.gather():
                check_type(key, file.dtype(key))
                check_shape(key, shape, is_a, projection)
                check_file_rank(key, shape[not is_a], rank)
    if adapter.plan.use_dora:
        with faults.gather():
            check_magnitudes(file, adapter.plan, adapter.modules, adapter.projections)


def _match(keys: Iterable[str], adapter: PeftAdapter, faults: Faults) -> dict[str, ModulePosition]:
    """Map tensors to modules of the model; unknown tensors and missing partners are faults."""
    known, projections = adapter.modules, adapter.projections
    factors: dict[str, list[tuple[str, str]]] = {}
    for module, position in known.items():
        names = factor_names(module, projections[position.projection], adapter.plan)
        for key, side in ((names.a, "A"), (names.b, "B")):
            factors.setdefault(key, []).append((module, side))
    idle = {PREFIX + module + suffix for module in known for suffix in IDLE_SUFFIXES}
    if adapter.plan.use_dora:
        idle |= {magnitude_key(module) for module in known}
    found: dict[str, set[str]] = {module: set() for module in adapter.ends.copied}
    other_names = adapter.other_names
    unknown = []
    for key in set(keys) - idle:
        for module, side in factors.get(key, ()):
            found.setdefault(module, set()).add(side)
        if key not in factors and key not in other_names:
            unknown.append(key)
    # Faults that were found before concern embedding or heads: their tensors are refused once.
    unknown = [k for k in unknown if not (faults and (_names_end(k) or k == SCORE_KEY))]
    for key in sorted(unknown)[:MAX_UNKNOWN]:
        with faults.gather():
            _refuse_tensor(key, adapter)
    for module, sides in found.items():
        for side in sorted({"A", "B"} - sides):
            names = factor_names(module, projections[known[module].projection], adapter.plan)
            missing = names.a if side == "A" else names.b
            with faults.gather():
                refuse(f"{missing} is missing beside its partner: the file is incomplete")
    others = (
        *(adapter.ends.matrices, adapter.score, adapter.tokens, adapter.norms.vectors),
        *(adapter.experts.pages, adapter.whole.modules),
    )
    if not (found or any(others) or faults):
        refuse(f"{WEIGHTS_NAME} holds no LoRA tensor: it adapts nothing")
    # In the model's order, so that staging writes the pools in memory order.
    whole = {module for module, sides in found.items() if len(sides) == 2}
    return {module: position for module, position in known.items() if module in whole}


def _names_end(key: str) -> bool:
    # Mamba's name is an encoder's for all that embeds.
    return ".backbone.embeddings." in key or not ENDS.isdisjoint(key.split("."))


def _inside_end(key: str) -> str:
    """The layer before or inside a head that factors in `key` adapt; "" for other keys."""
    path, found, _ = key.partition(FACTOR)
    names = path.split(".")
    is_inside = bool(found) and names[-1] not in ENDS and not BEHIND_LAYERS.isdisjoint(names)
    return ".".join(names[-2:]) if is_inside else ""


def _refuse_tensor(key: str, adapter: PeftAdapter) -> NoReturn:
    known = adapter.modules
    if inner := _inside_end(key):
        refuse(
            f"tensor {key} adapts a layer between decoder and head, or a pooler, which take no "
            f"adapters here: name {inner} in exclude_modules and retrain, or merge the adapter "
            "into the base model"
        )
    if _names_end(key):
        has_ends = any(p.kind in WHOLE_KINDS for p in adapter.projections)
        can_adapt = all(p.can_adapt_ends for p in adapter.projections)
        advice = "retrain it as LoRA factors alone" if has_ends else SETTING_ADVICE
        refuse(
            f"tensor {key} adapts the vocabulary (embeddings or head), which is not served here: "
            + (advice if can_adapt else INSIDE_ONLY_ADVICE)
        )
    if adapter.plan.bias != "none" and key.endswith(".bias"):
        refuse(
            f"bias={adapter.plan.bias!r}: {key} is the bias of no adaptable linear module; retrain "
            'with bias="lora_only", or merge the adapter into the base model'
        )
    if adapter.plan.parameters.names and FACTOR in key:
        refuse(
            f"target_parameters: {key} adapts neither a linear module's weight nor experts that "
            "are known here, which is not served: merge the adapter into the base model"
        )
    path = key.rpartition(".")[0]
    saved = [entry for entry in adapter.plan.modules_to_save if path.endswith(entry)]
    if saved and FACTOR not in key:
        refuse(
            f"modules_to_save={saved}: {key} is of a module that no adapter may bring here; name "
            "the others by longer paths and retrain, or merge the adapter into the base model"
        )
    names = sorted({module.rsplit(".", 1)[-1] for module in known})
    if not names:
        refuse(
            f"tensor {key} adapts a model that takes no adapters here: merge the adapter into the "
            "base model"
        )
    refuse(
        f"tensor {key} belongs to no adaptable module of this model (those are {', '.join(names)} "
        f"at {len(set(known.values()))} paths, named {PREFIX}<module>.lora_A.weight): is the "
        "adapter for another base model?"
    )


def _check_ranks(adapter: PeftAdapter, max_rank: int) -> None:
    ranks = {module: adapter.plan.rank_of(module) for module in adapter.modules}
    for index, own in adapter.experts.pages.items():
        ranks[adapter.projections[index].name] = own.rank
    for module, rank in ranks.items():
        if rank > max_rank:
            refuse(
                f"rank {rank} at {module} is above this server's max_rank {max_rank}: "
                "raise adapters.max_rank, or train with a smaller r",
                AdapterRefusal.TOO_LARGE,
            )


def _check_targets(adapter: PeftAdapter, known: Mapping[str, ModulePosition]) -> None:
    """Refuse modules that PEFT would leave out or initialise; known: all adaptable modules."""
    plan, projections = adapter.plan, adapter.projections
    left_out: dict[str, str] = {}
    for module, position in adapter.modules.items():
        kind = projections[position.projection].kind
        names: tuple[str, ...] = (module,)
        is_linear = kind in (ProjectionKind.LINEAR, ProjectionKind.ROUTER)
        if kind in WHOLE_KINDS and is_tied(plan, projections):
            names = tuple(m for m in known if projections[known[m].projection].kind in WHOLE_KINDS)
        fields = [plan.left_out_by(name, is_linear) for name in names]
        if None not in fields:
            left_out.setdefault(str(fields[0]), module)
    if left_out:
        module = next(iter(left_out.values()))
        refuse(
            f"the file adapts {module}, which {' and '.join(left_out)} of adapter_config.json "
            "leave out, and so PEFT leaves it out: correct that field, or remove the tensors"
        )
    if plan.random:
        _check_whole(adapter, known)


def _check_whole(adapter: PeftAdapter, known: Mapping[str, ModulePosition]) -> None:
    """Refuse a file that lacks factors which PEFT would initialise with random values."""
    given = set(adapter.modules.values())
    for module, position in known.items():
        is_linear = adapter.projections[position.projection].kind is ProjectionKind.LINEAR
        missing = position not in given and position not in adapter.ends.matrices.values()
        if missing and is_linear and adapter.plan.left_out_by(module, True) is None:
            refuse(
                f"the file holds nothing for {module}, which target_modules names, and "
                "init_lora_weights is false: PEFT would make up random factors; correct either"
            )


def _check_parts(plan: LoraPlan) -> None:
    """Refuse what is not cut: magnitudes and biases of fused modules."""
    if plan.parts and (plan.use_dora or plan.lora_bias or plan.bias != "none"):
        path = next(iter(plan.parts.values())).path
        refuse(
            f"the file adapts {path}, which this model has in parts, with DoRA or biases: serve "
            "the base model that it was trained on"
        )


def _check_once(adapter: PeftAdapter) -> None:
    """Refuse a module that the file adapts twice, by two names or by factors and a matrix.

    And modules that PEFT leaves out, as it takes names like theirs for experts' alone.
    """
    leaves = {path.rpartition(".")[2] for path in adapter.experts.paths}
    for module in adapter.modules:
        if module.rpartition(".")[2] in leaves and not adapter.plan.is_parameter(module):
            refuse(
                f"the file adapts {module} beside modules of single experts: PEFT adapts the "
                "experts alone; retrain with target_parameters, or merge it into the base model"
            )
    whole = {key.removesuffix(WEIGHT_SUFFIX) for key in adapter.ends.matrices}
    taken: set[ModulePosition] = set()
    for module, position in adapter.modules.items():
        if position in taken or PREFIX + module in whole:
            refuse(f"{module} is adapted twice: save the adapter again")
        taken.add(position)
    for module, position in adapter.whole.modules.items():
        if position in taken:
            refuse(f"{module} is adapted twice: save the adapter again")
    projections = adapter.projections
    kinds = {projections[at.projection].kind for at in (*taken, *adapter.ends.matrices.values())}
    for each in adapter.tokens:
        own = {projections[at.projection].kind for at in each.positions}
        if any({end, WHOLE_KINDS[end]} & kinds and TOKEN_KINDS[end] in own for end in TOKEN_KINDS):
            refuse(f"{each.key}: PEFT trains no single tokens of a module that it adapts or saves")
