"""The whole path, once: a cluster, the operator, a VLLMDeployment, a chat answer.

python -m e2e.demo                    on a one-machine Kubernetes that it brings up
python -m e2e.demo --context NAME     on an existing cluster, with images that it can pull
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from e2e import environment
from e2e.install import NAMESPACE, ROOT, install_operator
from e2e.kube import CommandError, Kube
from e2e.serving import chat, wait_ready
from e2e.waiting import say

EXAMPLE = ROOT / "examples" / "cpu-tiny.yaml"
PROMPT = "Say hello."


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m e2e.demo", description=__doc__, formatter_class=_Raw)
    parser.add_argument("--context", help="use this context of your kubeconfig instead of the embedded cluster")
    parser.add_argument("--operator-image", default=os.environ.get("OPERATOR_IMAGE"), help="or OPERATOR_IMAGE=...")
    parser.add_argument("--engine-image", default=os.environ.get("ENGINE_IMAGE"), help="or ENGINE_IMAGE=...")
    parser.add_argument("--timeout", type=float, default=900, help="seconds to wait for the engines (default 900)")
    options = parser.parse_args()
    try:
        env = _existing(options) if options.context else environment.bring_up()
        install_operator(env.kube, env.operator_image, env.engine_image)
        say(f"applying {EXAMPLE.relative_to(ROOT)}")
        env.kube.kubectl("apply", "-f", str(EXAMPLE))
        example = yaml.safe_load(EXAMPLE.read_text())["metadata"]
        deployment = wait_ready(env.kube, example["name"], example.get("namespace", "default"), options.timeout)
        say("asking for a chat completion through the Service")
        answer = chat(env.kube, deployment, PROMPT)
    except (CommandError, TimeoutError) as error:
        say(f"the demo failed: {error}")
        return 1
    _report(env.kube, deployment, answer, embedded=not options.context)
    return 0


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


def _existing(options: argparse.Namespace) -> environment.Environment:
    """Use a cluster that is there: it needs KubeRay, and images that it can pull."""
    if not options.operator_image or not options.engine_image:
        raise CommandError(
            "an existing cluster pulls the images itself: build them (python -m e2e.images build), push them, and set "
            "OPERATOR_IMAGE and ENGINE_IMAGE"
        )
    kube = Kube(tools=environment.tools(), context=options.context)
    if not kube.get("crd", "rayclusters.ray.io"):
        raise CommandError("KubeRay is not installed there: install its kuberay-operator chart (1.5.1 or newer) first")
    return environment.Environment(kube, options.operator_image, options.engine_image)


def _report(kube: Kube, deployment: Mapping[str, Any], answer: Mapping[str, Any], *, embedded: bool) -> None:
    name, namespace = deployment["metadata"]["name"], deployment["metadata"]["namespace"]
    print(f"\n{kube.kubectl('get', 'vllmdeployment', name, '-n', namespace)}")
    for replica in deployment["status"]["replicas"]:
        for rank in replica["attempt"]["ranks"]:
            print(f"replica {replica['index']}  {rank['instanceId']}  on {', '.join(rank['pods'])}")
    choice = answer["choices"][0]["message"]["content"]
    print(
        f"\n{PROMPT!r} -> {choice!r}\n"
        "(a tiny model with random weights: what it says means nothing; that it says it, does)"
    )
    print("\nWhat to try next:")
    print(f"  {_access(kube)}")
    print(f"  kubectl get vd,rayclusters,pods,endpointslices -n {namespace}")
    print(f"  kubectl get vd {name} -n {namespace} -o yaml     # what the operator knows, with every instance id")
    print(f"  kubectl scale vd {name} -n {namespace} --replicas=1")
    print(f"  kubectl logs -n {NAMESPACE} deployment/vllm-ray-operator")
    print(f"  kubectl delete vd {name} -n {namespace}          # takes everything with it")
    if embedded:
        print("  make demo-down                              # takes the cluster down")


def _access(kube: Kube) -> str:
    """Return the shell command after which plain kubectl reaches the cluster."""
    if kube.context:
        return f"kubectl config use-context {shlex.quote(kube.context)}"
    return f'export KUBECONFIG={shlex.quote(str(kube.kubeconfig))} PATH={shlex.quote(str(kube.tools))}:"$PATH"'


if __name__ == "__main__":
    raise SystemExit(main())
