"""The definition as a whole: what the API server would refuse, what would drift, what must not change by accident."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_ray_engine import arguments
from vllm_ray_operator.api import crd, owned, rules
from vllm_ray_operator.api.schema import at
from vllm_ray_operator.api.spec import VLLMDeploymentSpec
from vllm_ray_operator.plan import names

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = crd.schema()


def parts(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every part of a schema with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from parts(child, f"{path}.{name}".removeprefix("."))
    if "items" in schema:
        yield from parts(schema["items"], path + "[]")
    if "additionalProperties" in schema:
        yield from parts(schema["additionalProperties"], path + "{}")


def test_generated_files_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert crd.main(["--check", "--root", str(ROOT)]) == 0, capsys.readouterr().out


def test_writes_once_and_finds_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crd.main(["--check", "--root", str(tmp_path)]) == 1
    assert list(tmp_path.iterdir()) == []
    assert crd.main(["--root", str(tmp_path)]) == 0
    assert crd.main(["--check", "--root", str(tmp_path)]) == 0
    path = tmp_path / "crds" / "vllm-ray.dev_vllmdeployments.yaml"
    path.write_text(path.read_text().replace("maximum: 256", "maximum: 257"))
    capsys.readouterr()
    assert crd.main(["--check", "--root", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("crds/vllm-ray.dev_vllmdeployments.yaml: ")


def test_the_chart_has_the_same_definition_and_keeps_it() -> None:
    files = crd.files()
    plain = yaml.safe_load(files["crds/vllm-ray.dev_vllmdeployments.yaml"])
    chart = yaml.safe_load(files["charts/vllm-ray-operator-crds/templates/vllm-ray.dev_vllmdeployments.yaml"])
    assert chart["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert chart == plain
    assert len(files["crds/vllm-ray.dev_vllmdeployments.yaml"]) < 256 * 1024


def test_every_part_has_a_type_and_every_spec_field_a_description() -> None:
    for path, part in parts(SCHEMA):
        assert "type" in part or part.get("x-kubernetes-int-or-string"), path
        if path.startswith("spec") and not path.endswith(("args[]", "{}")):
            assert part.get("description"), path


def test_everything_in_the_spec_is_bounded() -> None:
    for path, part in parts(SCHEMA["properties"]["spec"]):
        if part.get("type") == "string" or part.get("x-kubernetes-int-or-string"):
            assert "maxLength" in part or "enum" in part or part.get("format") == "date-time", path
        if part.get("type") == "array":
            assert "maxItems" in part, path
        if part.get("type") == "integer":
            assert {"minimum", "maximum"} <= set(part), path
        if "additionalProperties" in part:
            assert "maxProperties" in part, path


def test_only_replicas_has_a_default() -> None:
    assert {path: part["default"] for path, part in parts(SCHEMA) if "default" in part} == {"spec.replicas": 1}
    assert VLLMDeploymentSpec.model_fields["replicas"].default == 1


def test_keys_of_map_lists_are_required() -> None:
    found = 0
    for path, part in parts(SCHEMA):
        for key in part.get("x-kubernetes-list-map-keys", ()):
            assert key in part["items"]["required"], path
            found += 1
    assert found == 5


@pytest.mark.parametrize("path", rules.RULES)
def test_rules(path: str) -> None:
    part = at(SCHEMA, path)
    assert len(part["x-kubernetes-validations"]) == len(rules.RULES[path])
    for rule in rules.RULES[path]:
        assert 20 < len(rule.message) < 300, rule.message
        assert "\n" not in rule.message
        if rule.field is not None and path:
            at(part, rule.field.removeprefix("."))


def test_the_port_after_the_last_one_is_a_port() -> None:
    """A standby listens on it."""
    assert at(SCHEMA, "spec.engine.port")["maximum"] == 65534


def test_every_rule_says_what_to_do() -> None:
    """Rules on owned names end in the remedy from the table."""
    table = {entry.instead for entry in (*owned.ENGINE_ARGUMENTS, *owned.ENVIRONMENT, *owned.METADATA)}
    messages = [rule.message for entries in rules.RULES.values() for rule in entries]
    of_tables = [message for message in messages if ": owned by the operator" in message]
    assert {message.split("; ", 1)[1] for message in of_tables} == table


def test_no_name_is_owned_twice() -> None:
    for table in (owned.ENGINE_ARGUMENTS, owned.ENVIRONMENT, owned.METADATA):
        all_names = [name for entry in table for name in entry.names]
        assert len(all_names) == len(set(all_names))


def test_admission_refuses_at_least_what_the_launcher_refuses() -> None:
    flags = {"--" + name.replace("_", "-") for name in arguments.OWNED if name != "model_tag"}
    long = [name for entry in owned.ENGINE_ARGUMENTS for name in entry.names if name.startswith("--")]
    families = tuple(name for name in long if name.endswith("-"))
    assert {flag for flag in flags if flag not in long and not flag.startswith(families)} == set()


def test_the_longest_name_makes_a_name_that_kuberay_takes() -> None:
    digest, last = names.short_hash({}), 9999
    assert len(names.ray_cluster("x" * rules.MAX_NAME_LENGTH, digest)) == 53
    assert len(names.ray_cluster("x" * rules.MAX_NAME_LENGTH_PER_REPLICA, digest, last)) == 53


def test_the_reference_has_every_field_and_every_owned_name() -> None:
    page = crd.files()["docs/api.md"]
    for path, _ in parts(SCHEMA):
        kind, _, field = path.partition(".")
        if kind in {"spec", "status"} and field and not field.endswith(("[]", "{}")):
            assert f"| `{field}` |" in page, path
    for table in (owned.ENGINE_ARGUMENTS, owned.ENVIRONMENT, owned.METADATA):
        for entry in table:
            assert all(f"`{name}" in page for name in entry.names)
            assert entry.instead[1:] in page


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_read_whole(path: Path) -> None:
    """Nothing in an example is unknown to the types (the API server checks the rest in the integration tests)."""
    for obj in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        spec = VLLMDeploymentSpec.model_validate(obj["spec"])
        read = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
        assert without_empty(read) == without_empty(obj["spec"])


def without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        pruned = {key: without_empty(item) for key, item in value.items()}
        return {key: item for key, item in pruned.items() if item not in ({}, [])}
    return value
