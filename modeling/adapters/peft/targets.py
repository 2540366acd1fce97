"""Which modules an adapter_config.json adapts, by PEFT's rules.

PEFT makes factors for these modules alone and silently ignores the file's others. So a file that
holds others does not fit its config.
(peft/tuners/tuners_utils.py: check_target_module_exists)
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from modeling.adapters.peft.patterns import MatchBudget, Pattern, PatternError

ALL_LINEAR = "all-linear"
"""The value of target_modules for every linear module, in upper or lower case."""

CONDENSED = 20
"""From so many names on PEFT shortens the list of target_modules, if it can."""

_MOST_LISTS = 16
_LONGEST = 256
"""Limits of layers_pattern."""

_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")
_ANY_LIST = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")


@dataclass(frozen=True)
class Modules:
    """Some modules: by names (ends of paths), by a pattern of whole paths, or all linear ones."""

    names: frozenset[str] = frozenset()
    pattern: Pattern | None = None
    all_linear: bool = False

    def include(self, path: str, is_linear: bool) -> bool:
        """Return whether the module at `path` is included; PatternError if that costs too much."""
        if self.pattern is not None:
            return self.pattern.fits(path)
        if self.all_linear:
            return is_linear
        if not self.names or path in self.names:
            return bool(self.names)
        # Most names are the last part of a path.
        start = len(path)
        while (start := path.rfind(".", 0, start)) >= 0:
            if path[start + 1 :] in self.names:
                return True
        return False


@dataclass(frozen=True)
class Targets:
    """The meaning of the config's fields.

    modules, excluded: of target_modules and exclude_modules.
    layers: adapted layers; None for all.
    lists: patterns of the names of lists of layers; () for any list.
    """

    modules: Modules
    excluded: Modules = Modules()
    layers: frozenset[int] | None = None
    lists: tuple[re.Pattern[str], ...] = ()

    def left_out_by(self, path: str, is_linear: bool) -> str | None:
        """Return the field by which PEFT leaves out the module; None if it is adapted."""
        if self.excluded.include(path, is_linear):
            return "exclude_modules"
        if not self.modules.include(path, is_linear):
            return "target_modules"
        if self.layers is None or self._layer(path) in self.layers:
            return None
        # PEFT adapts a whole path in any layer, unless it shortens the list of names.
        is_whole = path in self.modules.names and len(self.modules.names) < CONDENSED
        return None if is_whole else "layers_to_transform"

    def _layer(self, path: str) -> int | None:
        """Return the number after the first list of layers in the path."""
        found = (pattern.match(path) for pattern in self.lists or (_ANY_LIST,))
        match = next((each for each in found if each is not None), None)
        return None if match is None else int(match["idx"])


def read_targets(fields: Mapping[str, object], effort: MatchBudget) -> Targets:
    """Read the fields; ValueError for what PEFT does not accept either."""
    targets = fields.get("target_modules")
    if targets is None and fields.get("target_parameters"):
        targets = []
    if targets is None:
        raise ValueError(
            "target_modules is missing: name the modules that were trained; PEFT would guess them "
            "by the kind of the base model"
        )
    layers, lists = fields.get("layers_to_transform"), fields.get("layers_pattern")
    has_layers = layers is not None and layers != []
    for name, given in (("layers_to_transform", has_layers), ("layers_pattern", bool(lists))):
        if given and isinstance(targets, str):
            raise ValueError(f"{name} is for target_modules that is a list, here it is a text")
    if lists and layers is None:
        raise ValueError("layers_pattern needs layers_to_transform: remove one, or give both")
    return Targets(
        _modules("target_modules", targets, effort),
        _modules("exclude_modules", fields.get("exclude_modules") or [], effort),
        _layers(layers) if has_layers else None,
        _lists(lists),
    )


def _modules(name: str, value: object, effort: MatchBudget) -> Modules:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return Modules(names=frozenset(value))
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a list of names or a regular expression")
    if name == "target_modules" and value.lower() == ALL_LINEAR:
        return Modules(all_linear=True)
    try:
        return Modules(pattern=Pattern(value, effort))
    except PatternError as error:
        raise ValueError(f"{name} cannot be matched: {error}; list the names") from error


def _layers(value: object) -> frozenset[int]:
    layers = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) for each in layers):
        raise ValueError("layers_to_transform must be a layer's number, or a list of them")
    return frozenset(layers)


def _lists(value: object) -> tuple[re.Pattern[str], ...]:
    # PEFT reads a text of no letters as none.
    names = [value] if value and isinstance(value, str) else value or []
    # Each is compiled, and compared with every module's path.
    if (
        not isinstance(names, Sequence)
        or len(names) > _MOST_LISTS
        or not all(isinstance(each, str) and _PLAIN.fullmatch(each[:_LONGEST]) for each in names)
        or any(len(each) > _LONGEST for each in names)
    ):
        raise ValueError(
            "layers_pattern must be a name of the list of layers, or a list of those, at most "
            f"{_MOST_LISTS} of {_LONGEST} characters each"
        )
    return tuple(re.compile(rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\.") for name in names)


Value = TypeVar("Value")


class PatternTable(Generic[Value]):
    """rank_pattern or alpha_pattern: values by patterns of paths' ends; the first match wins.

    (peft/utils/other.py: get_pattern_key)
    """

    def __init__(self, entries: Mapping[str, Value], effort: MatchBudget) -> None:
        """Compile the keys; ValueError names a key that is no pattern or costs too much."""
        self._values = list(entries.values())
        self._effort = effort
        self._plain: dict[str, list[tuple[int, str]]] = {}
        self._patterns: list[tuple[int, Pattern]] = []
        for index, key in enumerate(entries):
            # Plain keys are indexed by their last part: a table may have hundreds of them.
            if _PLAIN.fullmatch(key):
                end = key[key.rfind(".") + 1 :]
                self._plain.setdefault(end, []).append((index, key))
            else:
                self._patterns.append((index, self._compile(key)))

    def find(self, path: str) -> Value | None:
        """Return the first matching key's value; PatternError if that costs too much."""
        first = len(self._values)
        if not first:
            return None  # Most adapters have no table, and this runs for each module.
        # Every end of the path may be a key's last part, as its dots match any character.
        for start in range(len(path) + 1):
            for index, key in self._plain.get(path[start:], ()):
                self._effort.spend(1)
                if index < first and _fits_end(key, path):
                    first = index
                    break
        for index, pattern in self._patterns:
            if index > first:
                break
            if pattern.begins(path):
                first = index
        return self._values[first] if first < len(self._values) else None

    def _compile(self, key: str) -> Pattern:
        try:
            return Pattern(rf"(.*\.)?({key})$", self._effort)
        except PatternError as error:
            shown = key if len(key) <= 80 else f"{key[:77]}..."
            raise ValueError(f"key {shown!r} cannot be matched: {error}") from error


def _fits_end(key: str, path: str) -> bool:
    """Return whether a plain key is the path's end; its dots match any character, as PEFT's do."""
    start = len(path) - len(key)
    if start < 0 or (start and path[start - 1] != "."):
        return False
    end = path[start:]
    return end == key or all(a in (b, ".") for a, b in zip(key, end, strict=True))
