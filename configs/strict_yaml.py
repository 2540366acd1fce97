"""YAML that says each thing once: the second of two equal keys would hide the first."""

from typing import Any

import yaml

_MERGE = "<<"


def load_yaml(text: str) -> Any:
    """The content of one document; ValueError with the line of what is wrong."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = "" if mark is None else f"line {mark.line + 1}: "
        context = "" if error.context is None else f"{error.context} "
        raise ValueError(f"{line}{context}{error.problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that a mapping has already."""

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value != _MERGE:
                    if (key.tag, key.value) in seen:
                        problem = f"the key `{key.value}` is there a second time"
                        raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                    seen.add((key.tag, key.value))
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found
