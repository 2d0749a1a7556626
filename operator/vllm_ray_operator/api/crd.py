"""The CustomResourceDefinition, made from the types: ``python -m vllm_ray_operator.api.crd [--check]``.

It is written to ``crds/``, into the CRD chart, and described in ``docs/api.md``. ``--check`` writes nothing and fails
when one of them is not what the types say.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from vllm_ray_operator.api import GROUP, KIND, PLURAL, VERSION, docs, rules
from vllm_ray_operator.api.schema import Schema, at, structural
from vllm_ray_operator.api.spec import VLLMDeploymentSpec
from vllm_ray_operator.api.status import VLLMDeploymentStatus

SHORT_NAME = "vd"

# Lists that are merged item by item, with the field that tells their items apart.
_MAP_LISTS = {
    "spec.engine.env": "name",
    "status.replicas": "index",
    "status.replicas[].attempt.ranks": "rank",
    "status.replicas[].standby.ranks": "rank",
    "status.conditions": "type",
}

# The scale subresource reads it, so it has to be there; it changes neither pods nor engines.
_DEFAULTS = {"spec.replicas": 1}


def _column(name: str, path: str, description: str, kind: str = "string") -> dict[str, str]:
    return {"name": name, "type": kind, "description": description, "jsonPath": path}


_COLUMNS = [
    _column("Model", ".spec.model.uri", "The model that is served."),
    _column("Replicas", ".status.replicaSummary", "Ready of wanted replicas."),
    _column("Revision", ".status.engineRevision", "The engine revision in use."),
    _column("Ready", '.status.conditions[?(@.type=="Ready")].status', "Whether the endpoint serves as asked for."),
    _column("Reason", '.status.conditions[?(@.type=="Ready")].reason', "Why it is or is not ready."),
    _column("Age", ".metadata.creationTimestamp", "Time since it was created.", "date"),
]


def schema() -> Schema:
    """Return the schema of the whole object."""
    root: Schema = {
        "type": "object",
        "description": "A model served by vLLM on Ray: one OpenAI-compatible endpoint over one or more engines.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": structural(VLLMDeploymentSpec),
            "status": structural(VLLMDeploymentStatus),
        },
    }
    for path, value in _DEFAULTS.items():
        at(root, path)["default"] = value
    for path, key in _MAP_LISTS.items():
        at(root, path).update({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]})
    for path, entries in rules.RULES.items():
        at(root, path)["x-kubernetes-validations"] = [rule.to_wire() for rule in entries]
    return root


def definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": [SHORT_NAME],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": _COLUMNS,
                    "schema": {"openAPIV3Schema": schema()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.currentReplicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                }
            ],
        },
    }


class _Dumper(yaml.SafeDumper):
    """YAML as people write it: no anchors, though one list may stand in two places, and the items of lists indented."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _yaml(crd: dict[str, Any]) -> str:
    body = yaml.dump(crd, Dumper=_Dumper, sort_keys=False, width=120)
    return f"# Made by `python -m vllm_ray_operator.api.crd` from operator/vllm_ray_operator/api. Do not edit.\n{body}"


def files() -> dict[str, str]:
    """Return what is made from the types: content by path in the repository."""
    crd = definition()
    name = crd["metadata"]["name"]
    # Deleting the chart must not delete every VLLMDeployment of the cluster.
    kept = {**crd, "metadata": {"name": name, "annotations": {"helm.sh/resource-policy": "keep"}}}
    chart = _yaml(kept)
    if "{{" in chart:
        raise ValueError("a description or rule has '{{', which Helm would take for a template")
    return {
        f"crds/{GROUP}_{PLURAL}.yaml": _yaml(crd),
        f"charts/vllm-ray-operator-crds/templates/{GROUP}_{PLURAL}.yaml": chart,
        "docs/api.md": docs.render(schema()),
    }


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or check them. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is not up to date")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the repository (default: the current folder)")
    options = parser.parse_args(arguments)
    stale = []
    for path, content in files().items():
        target = options.root / path
        if target.exists() and target.read_text(encoding="utf-8") == content:
            continue
        stale.append(path)
        if not options.check:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'is not what the types say; run make generate' if options.check else 'written'}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
