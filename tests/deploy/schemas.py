"""Schemas of what deploy/kubernetes/ holds, made small: schemas.json beside this file.

    python -m tests.deploy.schemas ray.io_rayservices.yaml _definitions.json

The first file is KubeRay's (helm-chart/kuberay-operator/crds/), the second Kubernetes' own
definitions as JSON schemas (version 1.36). Both are under the Apache License 2.0,
and so is what is made of them: without texts, equal parts once, and closed, for the API server
drops a key that it does not know, and a manifest must have none.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

FILE = Path(__file__).with_name("schemas.json")

KINDS = {
    ("v1", "Namespace"): "io.k8s.api.core.v1.Namespace",
    ("v1", "PersistentVolumeClaim"): "io.k8s.api.core.v1.PersistentVolumeClaim",
    ("v1", "Secret"): "io.k8s.api.core.v1.Secret",
    ("v1", "Service"): "io.k8s.api.core.v1.Service",
    ("apps/v1", "StatefulSet"): "io.k8s.api.apps.v1.StatefulSet",
    ("policy/v1", "PodDisruptionBudget"): "io.k8s.api.policy.v1.PodDisruptionBudget",
}
_DROPPED = {"description", "default", "format"}
_LARGE = 200
"""Characters from which a part that occurs twice is kept once."""

Schema = dict[str, Any]


def faults(manifest: Schema) -> Iterator[str]:
    """What Kubernetes or KubeRay would refuse or drop in a manifest."""
    content = json.loads(FILE.read_text("utf-8"))
    kind = f"{manifest.get('apiVersion')} {manifest.get('kind')}"
    if kind not in content["kinds"]:
        yield f"{kind}: no schema"
        return
    schema = {**content["kinds"][kind], "$defs": content["$defs"]}
    for error in Draft202012Validator(schema).iter_errors(manifest):
        yield f"{kind}: {error.json_path}: {error.message[:300]}"


class Reducer:
    """Makes schemas small; `parts` are those that several schemas share."""

    def __init__(self, definitions: Schema) -> None:
        self.parts: dict[str, Schema] = {}
        self._definitions = definitions
        self._names: dict[str, str] = {}

    def reduced(self, schema: Any, is_map: bool = False) -> Any:
        """The schema without texts, closed. is_map: its keys are names of properties."""
        if isinstance(schema, list):
            return [self.reduced(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema and not is_map:
            return {"$ref": self._referred(schema["$ref"].rpartition("/")[2])}
        kept = {key: self.reduced(value, key == "properties" and not is_map)
                for key, value in schema.items() if is_map or self._counts(key)}  # fmt: skip
        if is_map:
            return kept
        if schema.get("x-kubernetes-int-or-string"):
            return {"type": ["integer", "string"]}
        is_open = schema.get("x-kubernetes-preserve-unknown-fields")
        if "properties" in kept and "additionalProperties" not in kept and not is_open:
            kept["additionalProperties"] = False
        return self._shared(kept)

    def _counts(self, key: str) -> bool:
        return key not in _DROPPED and not key.startswith("x-kubernetes")

    def _referred(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = name
            self.parts[name] = {}  # a definition may refer to itself
            self.parts[name] = self.reduced(self._definitions[name])
        return f"#/$defs/{name}"

    def _shared(self, schema: Schema) -> Schema:
        text = json.dumps(schema, sort_keys=True)
        if len(text) < _LARGE:
            return schema
        name = self._names.setdefault(text, f"p{len(self._names)}")
        self.parts[name] = schema
        return {"$ref": f"#/$defs/{name}"}


def write(crd: Path, definitions: Path) -> None:
    """Make schemas.json."""
    reducer = Reducer(json.loads(definitions.read_text("utf-8"))["$defs"])
    [version] = [v for v in yaml.safe_load(crd.read_text("utf-8"))["spec"]["versions"]
                 if v["name"] == "v1"]  # fmt: skip
    # Kubernetes checks the metadata of every object by itself.
    ray = version["schema"]["openAPIV3Schema"]
    ray["properties"].pop("status", None)
    ray["properties"]["metadata"] = {
        "$ref": "#/definitions/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
    }
    kinds = {"ray.io/v1 RayService": reducer.reduced(ray)}
    for (group, kind), name in KINDS.items():
        kinds[f"{group} {kind}"] = reducer.reduced({"$ref": f"#/definitions/{name}"})
    content = {"kinds": kinds, "$defs": reducer.parts}
    FILE.write_text(json.dumps(content, separators=(",", ":"), sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
