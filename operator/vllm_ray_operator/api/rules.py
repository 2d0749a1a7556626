"""The CEL rules of the CRD: what admission refuses beyond types, each with the field and the remedy.

Every list and string that a rule reads is bounded in the types, since the API server rejects rules that could cost
too much. Unlike types, rules are not repeated when a resource is read: a stored object has passed them.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ray_operator.api import owned

# A RayCluster's name may have 53 characters; the operator adds "-" and 8 hex digits, for a cluster of one replica also
# "-" and its number of up to 4 digits (spec.replicas of several cluster revisions, and what may surge, 256 each).
MAX_NAME_LENGTH = 44
MAX_NAME_LENGTH_PER_REPLICA = 39
MAX_ACCELERATORS = 1024
DEFAULT_ACCELERATOR = "nvidia.com/gpu"


@dataclass(frozen=True)
class Rule:
    """One entry of ``x-kubernetes-validations``. ``field`` is the path that the error names, below the rule's own."""

    cel: str
    message: str
    field: str | None = None

    def to_wire(self) -> dict[str, str]:
        """Return the entry as it stands in the CRD."""
        entry = {"rule": self.cel, "message": self.message}
        return entry if self.field is None else {**entry, "fieldPath": self.field}


def _quote(text: str) -> str:
    """Return a CEL string literal."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _matches(value: str, pattern: str) -> str:
    return f"{value}.matches({_quote(pattern)})"


def _shown(entry: owned.Owned) -> str:
    return ", ".join(name + "*" if name.endswith(("-", "_", "/")) else name for name in entry.names)


def _long_option(names: list[str]) -> str:
    """Return CEL that is true for every spelling of long options: ``=value``, ``.key``, underscores, abbreviations."""
    quoted = ", ".join(_quote(name) for name in names)
    test = "name.startsWith(option)"
    if any(name.endswith("-") for name in names):
        test += " || (name.endsWith('-') && option.startsWith(name))"
    # A list of one is how CEL names a value that is used more than once.
    return f"[self.find('^--[^=.]+').replace('_', '-')].exists(option, option != '' && [{quoted}].exists(name, {test}))"


def _short_option(names: list[str]) -> str:
    """Return CEL that is true for every spelling of short options: ``-tp 2``, ``-tp=2``, ``-n2``, and ``-t 2``."""
    spellings = [name[1:] for name in names]
    abbreviations = sorted({name[:end] for name in spellings for end in range(1, len(name))})
    alternatives = spellings + [f"{short}(=|$)" for short in abbreviations]
    return _matches("self", f"^-({'|'.join(alternatives)})")


def _argument(entry: owned.Owned) -> Rule:
    """Return the rule on one engine argument that refuses an owned option."""
    long = [name for name in entry.names if name.startswith("--")]
    short = [name for name in entry.names if not name.startswith("--")]
    tests = ([_long_option(long)] if long else []) + ([_short_option(short)] if short else [])
    cel = " && ".join(f"!({test})" for test in tests)
    return Rule(cel, f"{_shown(entry)}: owned by the operator, in any spelling; {entry.instead}")


def _named(variable: str, entry: owned.Owned) -> str:
    """Return CEL that is true when a name is one of the entry's."""
    return " || ".join(
        f"{variable}.startsWith({_quote(name)})" if name.endswith(("_", "/")) else f"{variable} == {_quote(name)}"
        for name in entry.names
    )


def _message(entry: owned.Owned) -> str:
    return f"{_shown(entry)}: owned by the operator; {entry.instead}"


def _variable(entry: owned.Owned) -> Rule:
    return Rule(f"!({_named('self.name', entry)})", _message(entry), field=".name")


def _metadata(entry: owned.Owned) -> Rule:
    return Rule(f"self.all(key, !({_named('key', entry)}))", _message(entry))


def _word(field: str, path: str) -> Rule:
    """Return the rule on an optional string that goes into a command line as one word."""
    return Rule(
        f"!has(self.{field}) || " + _matches(f"self.{field}", r"^[^\s\x00-\x1f\x7f-][^\s\x00-\x1f\x7f]*$"),
        f"{path}.{field} must have no spaces or control characters and must not begin with '-'",
        field=f".{field}",
    )


_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"

_OBJECT = (
    Rule(
        _matches("self.metadata.name", "^[a-z]([-a-z0-9]*[a-z0-9])?$"),
        "metadata.name must be made of a-z, 0-9 and '-', begin with a letter and not end with '-': it names a Service",
        field=".metadata.name",
    ),
    Rule(
        f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
        f"metadata.name must have at most {MAX_NAME_LENGTH} characters: a RayCluster is named after it",
        field=".metadata.name",
    ),
    Rule(
        "!has(self.spec.cluster) || !has(self.spec.cluster.policy) || self.spec.cluster.policy != 'PerReplica' "
        f"|| size(self.metadata.name) <= {MAX_NAME_LENGTH_PER_REPLICA}",
        f"metadata.name must have at most {MAX_NAME_LENGTH_PER_REPLICA} characters when spec.cluster.policy is "
        "PerReplica: the RayCluster of each replica is named after it",
        field=".metadata.name",
    ),
    Rule(
        "self.metadata.name != 'vllm'",
        "metadata.name must not be 'vllm': a Service of that name gives every pod of the namespace a VLLM_PORT "
        "that vLLM takes for its own; choose another name, such as the model's",
        field=".metadata.name",
    ),
)

_MODEL = (
    _word("uri", "spec.model"),
    _word("revision", "spec.model"),
    _word("servedName", "spec.model"),
    Rule(
        "!self.uri.startsWith('hf:') || "
        + _matches("self.uri", "^hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$"),
        "a Hugging Face model is written hf://organisation/name, such as hf://Qwen/Qwen3-32B; "
        "a branch, tag or commit goes into spec.model.revision",
        field=".uri",
    ),
    Rule(
        "!self.uri.startsWith('pvc:') || " + _matches("self.uri", rf"^pvc://{_LABEL}(\.{_LABEL})*(/.*)?$"),
        "a model on a volume is written pvc://claim/path, with the name of a PersistentVolumeClaim of this namespace",
        field=".uri",
    ),
    Rule(
        "!self.uri.startsWith('file:') || self.uri.matches('^file:///.')",
        "a model in the image or a mounted folder is written file:///absolute/path, with three slashes",
        field=".uri",
    ),
    Rule(
        "!self.uri.matches('^(pvc|file):') || !" + _matches("self.uri", r"/\.\.(/|$)"),
        "spec.model.uri must not have '..' as a part of its path: write the path that is meant",
        field=".uri",
    ),
    Rule(
        "!has(self.revision) || self.uri.startsWith('hf://')",
        "only hf:// models have a revision: remove spec.model.revision or write spec.model.uri as "
        "hf://organisation/name",
        field=".revision",
    ),
)

_ENGINE = (
    Rule(
        "!has(self.image) || " + _matches("self.image", r"^[^\s\x00-\x1f\x7f]+$"),
        "spec.engine.image must have no spaces: it is one image reference, such as registry/vllm-ray:1.0",
        field=".image",
    ),
    Rule(
        "!has(self.args) || size(self.args) == 0 || self.args[0].matches('^--?[A-Za-z]')",
        "the first item of spec.engine.args must be an option such as --max-model-len=4096; "
        "the model goes into spec.model.uri",
        field=".args",
    ),
)

_PORT = (
    # The next port is kept for the engine that takes over: both have to be free.
    Rule(
        "!(self >= 8069 && self <= 8071) && self != 8079 && self != 8080 && self != 52364 && self != 52365 "
        "&& !(self >= 10000 && self <= 19999)",
        "spec.engine.port and the port after it must be free in Ray pods: not 8070 and 8071 (the launchers), 8080 "
        "(Ray's metrics), 52365 (Ray's agent) or 10001 to 19999 (Ray's workers); the default is 8000",
    ),
)

_ARGUMENT = (
    Rule(
        _matches("self", r"^[^\x00-\x1f\x7f]*$"),
        "an engine argument must have no control characters or line breaks: mount a file for long texts",
    ),
    Rule(
        "!" + _matches("self", r"^-[^=\s]*\s"),
        "an option and its value are two items of spec.engine.args, or one with '=': --max-model-len=4096",
    ),
    Rule(
        "!self.matches('^--?$')",
        "'--' and '-' are no options: every item of spec.engine.args is an option such as --max-model-len=4096 "
        "or the value of the option before it",
    ),
    *map(_argument, owned.ENGINE_ARGUMENTS),
)

_VARIABLE = (
    Rule(r"!self.value.contains('\x00')", "the value of an environment variable must have no NUL", field=".value"),
    *map(_variable, owned.ENVIRONMENT),
)

_PARALLELISM = (
    Rule(
        f"(has(self.tensor) ? self.tensor : 1) * (has(self.pipeline) ? self.pipeline : 1) <= {MAX_ACCELERATORS}",
        f"one replica has at most {MAX_ACCELERATORS} accelerators: reduce spec.parallelism.tensor x pipeline, "
        "use spec.replicas for more engines",
    ),
)

_TENSOR, _PIPELINE = (
    f"(has(self.parallelism) && has(self.parallelism.{kind}) ? self.parallelism.{kind} : 1)"
    for kind in ("tensor", "pipeline")
)
_SPEC = (
    # What an engine leaves over of its slot could be enough for its standby, which would start beside it at once.
    Rule(
        "!has(self.cluster) || !has(self.cluster.workers) || !has(self.cluster.workers.acceleratorsPerNode) "
        f"|| self.cluster.workers.acceleratorsPerNode <= {_TENSOR} * {_PIPELINE}",
        "spec.cluster.workers.acceleratorsPerNode must not be more than one replica has: set it to at most "
        "spec.parallelism.tensor x pipeline (each 1 by default), or leave it out",
        field=".cluster.workers.acceleratorsPerNode",
    ),
)

_SUSPEND = Rule(
    "!has(self.suspend) || !self.suspend || !has(self.rollout) || !has(self.rollout.paused) || !self.rollout.paused",
    "spec.suspend and spec.rollout.paused must not both be true, since the one stops what the other leaves as it is: "
    "remove spec.rollout.paused; changes of the spec that it held back are taken on when spec.suspend ends",
    field=".suspend",
)

_CLUSTER = (
    Rule(
        "!has(self.rayVersion) || (has(self.auth) && self.auth == 'Disabled') "
        "|| int(self.rayVersion.split('.')[0]) > 2 "
        "|| (int(self.rayVersion.split('.')[0]) == 2 && int(self.rayVersion.split('.')[1]) >= 52)",
        "token authentication needs Ray 2.52 or newer: use a newer image and spec.cluster.rayVersion, "
        "or set spec.cluster.auth to Disabled",
        field=".rayVersion",
    ),
)

_ACCELERATOR = f"(has(self.acceleratorResource) ? self.acceleratorResource : '{DEFAULT_ACCELERATOR}')"
_WORKERS = tuple(
    Rule(
        f"!has(self.resources) || !has(self.resources.{kind}) || !({_ACCELERATOR} in self.resources.{kind})",
        "accelerators are not set in resources: use spec.cluster.workers.acceleratorResource and acceleratorsPerNode",
        field=f".resources.{kind}",
    )
    for kind in ("requests", "limits")
)


def _is_zero(field: str, *, default: bool) -> str:
    """Return CEL that is true when a number or percentage is 0. ``default``: whether one that is left out is."""
    value = f"(type(self.{field}) == string ? self.{field} == '0%' : self.{field} == 0)"
    return f"(!has(self.{field}) || {value})" if default else f"(has(self.{field}) && {value})"


_ROLLOUT = (
    Rule(
        f"(has(self.type) && self.type == 'Recreate') || !{_is_zero('maxUnavailable', default=False)} "
        f"|| !{_is_zero('maxSurge', default=True)}",
        "spec.rollout.maxUnavailable and maxSurge must not both be 0, or no replica could ever be restarted: "
        "allow one to be unavailable, or one more than replicas if there are accelerators for it",
        field=".maxUnavailable",
    ),
    Rule(
        "!has(self.toRevision) || " + _matches("self.toRevision", "-engine-[0-9a-f]{8}$"),
        "spec.rollout.toRevision is the name of an engine revision, such as chat-engine-1a2b3c4d; "
        "a cluster revision goes into spec.rollout.toClusterRevision",
        field=".toRevision",
    ),
    Rule(
        "!has(self.toClusterRevision) || " + _matches("self.toClusterRevision", "-cluster-[0-9a-f]{8}$"),
        "spec.rollout.toClusterRevision is the name of a cluster revision, such as chat-cluster-1a2b3c4d; "
        "an engine revision goes into spec.rollout.toRevision",
        field=".toClusterRevision",
    ),
)

_RESTART = (
    Rule(
        "(has(self.maxBackoffSeconds) ? self.maxBackoffSeconds : 300) >= "
        "(has(self.backoffSeconds) ? self.backoffSeconds : 10)",
        "spec.restart.maxBackoffSeconds (default 300) must not be less than backoffSeconds (default 10)",
        field=".maxBackoffSeconds",
    ),
)

_METADATA = tuple(map(_metadata, owned.METADATA))

# By the path of the schema that carries them; "[]" is the item of a list, "" the whole object.
RULES: dict[str, tuple[Rule, ...]] = {
    "": _OBJECT,
    "spec": (*_SPEC, _SUSPEND),
    "spec.model": _MODEL,
    "spec.engine": _ENGINE,
    "spec.engine.port": _PORT,
    "spec.engine.args[]": _ARGUMENT,
    "spec.engine.env[]": _VARIABLE,
    "spec.parallelism": _PARALLELISM,
    "spec.cluster": _CLUSTER,
    "spec.cluster.workers": _WORKERS,
    "spec.rollout": _ROLLOUT,
    "spec.restart": _RESTART,
    "spec.cluster.labels": _METADATA,
    "spec.cluster.annotations": _METADATA,
}
