"""Read adapter_config.json: every field of PEFT's LoraConfig is served, ignored or refused.

An adapter is served exactly or not at all. A field that these tables lack is no field of any
release of PEFT that is known here. PEFT ignores such fields, and so does this reader, except where
a newer PEFT wrote the file: there it is refused unless its value switches it off (null, false,
empty).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from configs.wire.adapters import MAX_INVOCATION, AdapterRefusal, are_tokens
from modeling.adapters.faults import Faults, refuse
from modeling.adapters.peft.config_file import read_config
from modeling.adapters.peft.fused import FusedPart
from modeling.adapters.peft.kinds import init_advice, is_peft_newer, tuner_advice
from modeling.adapters.peft.patterns import MatchBudget, PatternError
from modeling.adapters.peft.targets import Modules, PatternTable, Targets, read_targets

SERVED = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
    | {"init_lora_weights", "ensure_weight_tying", "modules_to_save", "alora_invocation_tokens"}
    | {"use_dora", "bias", "lora_bias"}
    | {"target_modules", "target_parameters", "trainable_token_indices", "exclude_modules"}
    | {"layers_to_transform", "layers_pattern", "task_type"}
)

IGNORED: Mapping[str, str] = {
    "auto_mapping": "how PEFT finds the base class",
    "peft_version": "informational",
    "base_model_name_or_path": "informational; shapes are compared instead",
    "revision": "of the base model, informational",
    "inference_mode": "whether PEFT freezes the weights",
    "lora_dropout": "training only",
    "fan_in_fan_out": "the base weight's layout in memory; A and B have the same layout either way",
    "megatron_core": "names a module; megatron_config switches it on",
    "loftq_config": "init only; init_lora_weights says whether it was used",
    "eva_config": "init only; its results are in rank_pattern and alpha_pattern",
    "corda_config": "init only; init_lora_weights says whether it was used",
    "lora_ga_config": "init only; init_lora_weights says whether it was used",
    "velora_config": "changes the backward pass only; its tensors in the file are not read",
    "qalora_group_size": "read only when use_qalora is set",
    "runtime_config": "never saved",
    "merge_weights": "of PEFT before 0.4: how the weights lay in memory while it ran",
    "lora_dtype": "of ms-swift: the type that was trained; the file has its own",
    "lorap_lr_ratio": "of ms-swift: training only",
    "lorap_emb_lr": "of ms-swift: training only",
}

REFUSED: Mapping[str, str] = {
    "layer_replication": "save the replicated model as a base model of its own",
    "megatron_config": "save the adapter without Megatron layers",
    "use_qalora": "convert the adapter to plain LoRA",
    "use_bdlora": "convert the adapter to plain LoRA",
    "monteclora_config": "convert the adapter to plain LoRA",
    "arrow_config": "a router over adapters is not served; name one adapter per request",
    "kasa_config": "it changes the base weights, and PEFT has no conversion; retrain it",
    "enable_lora": "of PEFT before 0.3: a part of a fused module alone; retrain with a newer PEFT",
    "use_merged_linear": "of ms-swift: a part of a fused module alone; retrain it without",
    "use_qa_lora": "of ms-swift: its inputs are averaged in groups; retrain it without",
    "model_key_mapping": "of ms-swift: save it by the modules' own names",
}

DECIDED = SERVED | set(IGNORED) | set(REFUSED)

NEWER_ADVICE = (
    "the field is unknown here, and a newer PEFT wrote the file; update the server, or save the "
    "adapter as plain LoRA"
)

HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""Kinds of init_lora_weights that leave the base weights as they were (peft/tuners/lora/layer.py);
the others subtract from them, so that A and B alone do not give the trained model."""

WEIGHT = ".weight"

WITHOUT_PARAMETERS = (
    *("use_dora", "lora_bias", "fan_in_fan_out", "alora_invocation_tokens", "ensure_weight_tying"),
)
"""Fields that PEFT does not take together with target_parameters, or not as the field says."""

MAX_PATTERNS = 4096
"""Most keys of a rank_pattern or alpha_pattern: enough for every module of a very large model."""

MAX_STEPS = 2**20
"""Budget of matching an adapter's patterns, one or two seconds of a thread. 560 paths joined by
bars take 50 % of it over 560 modules, a trainer's pattern of a few hundred characters 10 %."""


@dataclass(frozen=True)
class LoraPlan:
    """The ranks and scalings of an adapter_config.json.

    rank, alpha, use_rslora: of modules without a pattern's value.
    rank_pattern, alpha_pattern: in the file's order; the first match wins, as in PEFT.
    ensure_weight_tying: an adapted embedding and head were trained as one weight.
    modules_to_save: ends of the paths of modules that the file holds whole.
    targets: which modules are adapted.
    parameters: which are adapted as bare parameters, by ends of the parameters' paths.
    tokens: ids of trained tokens, by the ends of modules' paths; "" is the embedding.
    invocation: the tokens that activate an adapter (aLoRA, arXiv:2504.12397): it changes the model
    from their last occurrence in a prompt on; () for adapters that always do.
    use_dora: whether a magnitude scales each output row (DoRA, arXiv:2402.09353).
    bias: which biases of the base model the file holds: none, lora_only or all.
    lora_bias: whether B has a bias.
    random: whether PEFT initialises factors that the file lacks with random values.
    task: PEFT's task_type; None for one that is not known.
    unread: fields that no release of PEFT reads.
    parts: modules that the file, and so the config, names as a part of a fused one.
    config: the file's text.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: PatternTable[int]
    alpha_pattern: PatternTable[float]
    ensure_weight_tying: bool
    modules_to_save: tuple[str, ...]
    targets: Targets
    parameters: Modules
    tokens: Mapping[str, tuple[int, ...]]
    invocation: tuple[int, ...]
    use_dora: bool
    bias: str
    lora_bias: bool
    random: bool
    task: str | None
    unread: tuple[str, ...] = ()
    parts: Mapping[str, FusedPart] = field(default_factory=dict)
    config: str = field(default="", compare=False, repr=False)
    _ranks: dict[str, int] = field(default_factory=dict, compare=False)
    _scalings: dict[str, float] = field(default_factory=dict, compare=False)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, named by its path in the base model."""
        if module not in self._ranks:
            found = _find("rank_pattern", self.rank_pattern, self._key(module))
            self._ranks[module] = self.rank if found is None else found
        return self._ranks[module]

    def scaling_of(self, module: str) -> float:
        """Return alpha / r of a module, or alpha / sqrt(r) with rsLoRA (arXiv:2312.03732)."""
        if module not in self._scalings:
            found = _find("alpha_pattern", self.alpha_pattern, self._key(module))
            alpha = self.alpha if found is None else found
            rank = self.rank_of(module)
            self._scalings[module] = alpha / (math.sqrt(rank) if self.use_rslora else rank)
        return self._scalings[module]

    def is_parameter(self, module: str) -> bool:
        """Return whether a module's weight is adapted as a bare parameter."""
        # Most adapters name none, and this runs several times for each module.
        named = self.parameters
        return bool(named.names) and named.include(self.path(module) + WEIGHT, False)

    def path(self, module: str) -> str:
        """Return the path by which file and config name a module."""
        part = self.parts.get(module)
        return module if part is None else part.path

    def _key(self, module: str) -> str:
        """Return the path that PEFT compares with patterns."""
        path = self.path(module)
        return path + WEIGHT if self.is_parameter(module) else path

    def left_out_by(self, module: str, is_linear: bool) -> str | None:
        """Return the field by which PEFT leaves a module out; None for one that is adapted."""
        if self.is_parameter(module):
            return None
        try:
            return self.targets.left_out_by(self.path(module), is_linear)
        except PatternError as error:
            refuse(f"target_modules or exclude_modules: {error}; list the names")


Value = TypeVar("Value")


def _find(name: str, table: PatternTable[Value], module: str) -> Value | None:
    try:
        return table.find(module)
    except PatternError as error:
        refuse(f"{name}: {error}; write the modules' names out")


def check_config(folder: Path, faults: Faults, within: Path | None = None) -> LoraPlan | None:
    """Read and check a folder's adapter_config.json; None, with faults, if a served field is wrong.

    within: the folder that links must not lead out of.
    """
    with faults.gather():
        text, fields = read_config(folder, within)
        plan = check_fields(fields, faults)
        return None if plan is None else replace(plan, config=text)
    return None


def check_fields(fields: Mapping[str, object], faults: Faults) -> LoraPlan | None:
    """Return the plan of the served fields, even if others are wrong; None if one of them is."""
    if fields.get("peft_type") != "LORA":
        with faults.gather():
            kind = fields.get("peft_type")
            refuse(f"peft_type {_short(kind)} is not served, only 'LORA'; {tuner_advice(kind)}")
        return None
    with faults.gather():
        _check_init(fields.get("init_lora_weights", True))
    is_newer = is_peft_newer(fields.get("peft_version"))
    for name, value in fields.items():
        if name in REFUSED or (is_newer and name not in DECIDED):
            with faults.gather():
                _check_unserved(name, value)
    # Faults of served fields alone make the plan unusable; others leave it to further checks.
    own = Faults()
    plan = _plan(fields, own)
    with faults.gather():
        own.check()
    return None if own else plan


def _plan(fields: Mapping[str, object], faults: Faults) -> LoraPlan:
    """Read the served fields; the plan must not be used if faults were found."""
    effort = MatchBudget(MAX_STEPS)
    parts: dict[str, Any] = {}
    readers: dict[str, Callable[[], object]] = {
        "rank": lambda: _rank("r", fields.get("r", 8)),
        "alpha": lambda: _alpha("lora_alpha", fields.get("lora_alpha", 8)),
        "use_rslora": lambda: _flag("use_rslora", fields.get("use_rslora")),
        "rank_pattern": lambda: _table("rank_pattern", fields, _rank, effort),
        "alpha_pattern": lambda: _table("alpha_pattern", fields, _alpha, effort),
        "ensure_weight_tying": lambda: _flag(
            "ensure_weight_tying", fields.get("ensure_weight_tying")
        ),
        "modules_to_save": lambda: _names("modules_to_save", fields.get("modules_to_save")),
        "targets": lambda: _targets(fields, effort),
        "parameters": lambda: _parameters(fields),
        "tokens": lambda: _tokens(fields.get("trainable_token_indices")),
        "bias": lambda: _bias(fields.get("bias")),
        "lora_bias": lambda: _flag("lora_bias", fields.get("lora_bias")),
        "use_dora": lambda: _flag("use_dora", fields.get("use_dora")),
        "invocation": lambda: read_invocation(fields.get("alora_invocation_tokens")),
    }
    for name, read in readers.items():
        parts[name] = None
        with faults.gather():
            parts[name] = read()
    random = not fields.get("init_lora_weights", True)
    task = fields.get("task_type")
    unread = tuple(name for name in fields if name not in DECIDED)
    known = task if isinstance(task, str) else None
    return LoraPlan(**parts, random=random, task=known, unread=unread)


def read_invocation(value: object) -> tuple[int, ...]:
    """The tokens of alora_invocation_tokens; () where the field is off. Refuses all else."""
    if value is None or value == []:
        return ()
    name = "alora_invocation_tokens"
    if not are_tokens(value):
        refuse(f"{name}={_short(value)} must be a list of token ids")
    if len(value) > MAX_INVOCATION:
        refuse(f"{name} has {len(value)} tokens, over the {MAX_INVOCATION} that it may have")
    return tuple(value)


def _check_init(value: object) -> None:
    """Refuse inits that moved a part of the base weights into A and B."""
    if isinstance(value, bool) or value is None:
        return
    if not isinstance(value, str) or value.lower() not in HARMLESS_INITS:
        refuse(f"init_lora_weights={_short(value)} is not served: {init_advice(value)}")


def _check_unserved(name: str, value: object) -> None:
    """Refuse a field that is set and not served."""
    if _is_inert(value):
        return
    advice = REFUSED.get(name, NEWER_ADVICE)
    refuse(f"{name}={_short(value)} is not served: {advice}")


def _is_inert(value: object) -> bool:
    """Return whether a value switches a field off, by itself or by all that it contains."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    values = list(held) or [value]
    # By identity: 0 equals False, but 0 may be a meaningful value of an unknown field.
    return all(each is None or each is False or each in ("", [], {}) for each in values)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _rank(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(f"{name}={_short(value)} must be a positive integer")
    return value


def _alpha(name: str, value: object) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(float(str(value))):
        refuse(f"{name}={_short(value)} must be a finite number")
    return float(str(value))


def _flag(name: str, value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    refuse(f"{name}={_short(value)} must be true or false")


def _bias(value: object) -> str:
    if _is_inert(value):
        return "none"
    if value not in ("none", "lora_only", "all"):
        refuse(f"bias={_short(value)} must be none, lora_only or all")
    return str(value)


def _names(name: str, value: object) -> tuple[str, ...]:
    if _is_inert(value):
        return ()
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        refuse(f"{name}={_short(value)} must be a list of names")
    return tuple(value)


def _table(
    name: str,
    fields: Mapping[str, object],
    read: Callable[[str, object], Value],
    effort: MatchBudget,
) -> PatternTable[Value]:
    """Return the table of rank_pattern or alpha_pattern; values are checked as r or lora_alpha."""
    value = fields.get(name)
    entries = {} if value in (None, [], "") or value is False else value
    if not isinstance(entries, dict):
        refuse(f"{name}={_short(value)} must be an object")
    if len(entries) > MAX_PATTERNS:
        refuse(
            f"{name} has {len(entries)} keys, over the {MAX_PATTERNS} that it may have: write one "
            "key for the modules that are alike",
            AdapterRefusal.TOO_LARGE,
        )
    values = {key: read(f"{name}[{_short(key)}]", entries[key]) for key in entries}
    try:
        return PatternTable(values, effort)
    except ValueError as error:
        refuse(f"{name}: {error}")


def _targets(fields: Mapping[str, object], effort: MatchBudget) -> Targets:
    try:
        return read_targets(fields, effort)
    except ValueError as error:
        refuse(str(error))


def _parameters(fields: Mapping[str, object]) -> Modules:
    names = _names("target_parameters", fields.get("target_parameters"))
    for other in WITHOUT_PARAMETERS if names else ():
        if not _is_inert(fields.get(other)):
            refuse(
                f"{other}={_short(fields[other])} beside target_parameters: PEFT has no such "
                "adapters; name modules in target_modules instead"
            )
    return Modules(frozenset(names))


def _tokens(value: object) -> dict[str, tuple[int, ...]]:
    if _is_inert(value):
        return {}
    named: dict[str, Any] = value if isinstance(value, dict) else {"": value}
    lists = [
        isinstance(ids, list) and all(type(each) is int for each in ids) for ids in named.values()
    ]
    if not all(lists) or (named is value and "" in named):
        refuse(
            f"trainable_token_indices={_short(value)} must be a list of token ids, or one by "
            "the name of each module"
        )
    return {name: tuple(ids) for name, ids in named.items() if ids}
