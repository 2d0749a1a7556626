"""The command line: ``python -m e2e.cluster``."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from e2e.cluster.cluster import Cluster, Mode
from e2e.cluster.controlplane import control_plane_namespaces, resolver_file
from e2e.cluster.errors import ClusterError
from e2e.cluster.faults import Fault, inject, mend
from e2e.cluster.layout import Layout
from e2e.cluster.packages import ensure_packages
from e2e.cluster.preflight import probe, problem
from e2e.cluster.progress import Progress
from e2e.cluster.teardown import take_down
from e2e.cluster.tools import ensure_tools

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

FAILED, UNFIT, INTERRUPTED = 1, 2, 130

# Only the command itself, in a mount namespace of its own, sees the other resolv.conf.
WITH_RESOLVER = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'

DESCRIPTION = """\
A real Kubernetes with KubeRay on this machine, in network namespaces of its own.

Needs Linux, root, Go 1.25, 12 GB of memory and 15 GB of disk. The first `up` builds everything from
source (some 15 minutes on two cores); later ones take seconds. Every command may be interrupted and
run again. Nothing of the machine's own network is changed; the API server is reached through a
forwarder on 127.0.0.1, by the kubeconfig that `kubeconfig` prints.
"""


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = argparse.ArgumentParser(
        prog="python -m e2e.cluster", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--name", default="vro", help="name of the cluster; several can stand side by side (default: vro)")
    top.add_argument("--state-dir", type=Path, help="folder of its state (default: in the user's cache folder)")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="bring the cluster up; quick when it is up; starts again what has died")
    up.add_argument(
        "--mode",
        type=Mode,
        choices=list(Mode),
        default=Mode.CONTROL_PLANE,
        help="control-plane: etcd, API server, controller manager, KubeRay, CRDs (pods stay Pending); "
        "node: also scheduler, kubelet, containerd, kube-proxy and DNS (default: control-plane)",
    )
    up.add_argument("--nodes", type=int, default=1, help="how many nodes in node mode (default: 1)")
    up.set_defaults(run=_up)

    down = commands.add_parser("down", help="take the cluster away; only its images are kept for the next time")
    down.add_argument("--purge", action="store_true", help="remove its images too")
    down.set_defaults(run=_down)

    plain = {
        "status": (_status, "what runs, where its logs are; exit 0 if all runs, 1 if not, 3 if it is down"),
        "kubeconfig": (_kubeconfig, "print the path of the administrator's kubeconfig"),
        "tools": (_tools, "have kubectl and helm fetched, and print their folder"),
        "prepare": (_prepare, "check the machine and install the Debian packages that it lacks; `up` does it too"),
    }
    for name, (run, text) in plain.items():
        commands.add_parser(name, help=text).set_defaults(run=run)

    for name, (act, text) in {
        "break": (inject, "cut a node off (network), cut its power (node), or kill the API server; `up` mends all"),
        "mend": (mend, "undo it, and wait until it is there again"),
    }.items():
        faults = commands.add_parser(name, help=text)
        faults.add_argument("fault", type=Fault, choices=list(Fault), help="what")
        faults.add_argument("node", nargs="?", help="the node's name; the API server has none")
        faults.set_defaults(run=_on_fault, act=act)

    inside = commands.add_parser(
        "exec", help="run a command in the cluster's network, with KUBECONFIG and PATH set: exec -- CMD"
    )
    inside.add_argument("--node", help="name of the node whose network it is (default: the first one, if any)")
    inside.add_argument("words", nargs="+", metavar="CMD", help="the command")
    inside.set_defaults(run=_exec)

    kubectl = commands.add_parser("kubectl", help="run kubectl as administrator: kubectl -- ARGS")
    kubectl.add_argument("words", nargs="*", metavar="ARGS", help="kubectl's arguments")
    kubectl.set_defaults(run=_kubectl)

    load = commands.add_parser("load", help="import Docker or OCI image archives into every node, if not there already")
    load.add_argument("archives", nargs="+", type=Path, metavar="IMAGE_ARCHIVE")
    load.set_defaults(run=_load)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = parser().parse_args(argv)
    try:
        layout = Layout.of(arguments.name, arguments.state_dir)
        run: Callable[[argparse.Namespace, Cluster], int] = arguments.run
        return run(arguments, Cluster(layout, Progress()))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except ExceptionGroup as group:
        failures, rest = group.split(ClusterError)
        for failure in _leaves(failures):
            print(f"error: {failure}", file=sys.stderr)
        if rest is not None:
            raise rest from None
        return FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted: run it again to go on, or `down` to take everything away", file=sys.stderr)
        return INTERRUPTED


def _run(work: Coroutine[object, object, T]) -> T:
    """Run to the end, or to an interruption: SIGTERM is as orderly as Ctrl-C."""

    async def interruptible() -> T:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    return asyncio.run(interruptible())


def _is_fit(cluster: Cluster) -> bool:
    """Tell whether the machine does for a cluster; say what it lacks if not."""
    lacking = problem(probe(cluster.layout.cache))
    if lacking is not None:
        print(f"error: {lacking}", file=sys.stderr)
    return lacking is None


def _prepare(_: argparse.Namespace, cluster: Cluster) -> int:
    if not _is_fit(cluster):
        return UNFIT
    _run(ensure_packages(cluster.progress))
    return 0


def _up(arguments: argparse.Namespace, cluster: Cluster) -> int:
    if not _is_fit(cluster):
        return UNFIT
    if arguments.nodes < 1:
        raise ClusterError("--nodes: at least 1")
    _run(cluster.up(arguments.nodes if arguments.mode is Mode.NODE else 0))
    cluster.progress.say(f"cluster {cluster.layout.name} is up")
    print(f"export KUBECONFIG={cluster.layout.kubeconfig}")
    return 0


def _down(arguments: argparse.Namespace, cluster: Cluster) -> int:
    _run(take_down(cluster, purge=arguments.purge))
    return 0


def _on_fault(arguments: argparse.Namespace, cluster: Cluster) -> int:
    act: Callable[[Cluster, Fault, str | None], Coroutine[object, object, None]] = arguments.act
    _require_up(cluster)
    _run(act(cluster, arguments.fault, arguments.node))
    return 0


def _load(arguments: argparse.Namespace, cluster: Cluster) -> int:
    _run(cluster.load(arguments.archives))
    return 0


def _kubeconfig(_: argparse.Namespace, cluster: Cluster) -> int:
    _require_up(cluster)
    print(cluster.layout.kubeconfig)
    return 0


def _tools(_: argparse.Namespace, cluster: Cluster) -> int:
    print(_run(ensure_tools(cluster.layout, cluster.progress)).folder)
    return 0


def _status(_: argparse.Namespace, cluster: Cluster) -> int:
    intent = cluster.intent()
    running, missing = cluster.processes(), cluster.missing()
    if intent is None and not running:
        print(f"cluster {cluster.layout.name} is down")
        return 3
    lines = [
        f"{name:<28} running  pid {process.pid:<8} {process.resident_bytes() / 1e6:6.0f} MB"
        for name, process in running.items()
    ]
    lines += [f"{name:<28} NOT RUNNING, log: {cluster.supervisor.log_of(name)}" for name in missing]
    if intent is not None:
        lines += [f"mode         {intent.mode}", f"API server   https://127.0.0.1:{intent.port}"]
    lines += [
        f"nodes        {', '.join(node.name for node in cluster.nodes()) or 'none'}",
        f"kubeconfig   {cluster.layout.kubeconfig}",
        f"audit log    {cluster.layout.audit_log}",
        f"logs         {cluster.layout.logs}",
    ]
    print("\n".join(lines))
    return 1 if missing or intent is None else 0


def _exec(arguments: argparse.Namespace, cluster: Cluster) -> int:
    _require_up(cluster)
    nodes = {node.name: node for node in cluster.nodes()}
    if arguments.node is not None and arguments.node not in nodes:
        raise ClusterError(f"no node {arguments.node!r}; there are: {', '.join(nodes) or 'none'}")
    # Services work only where a kube-proxy is: on nodes.
    node = nodes[arguments.node] if arguments.node else next(iter(nodes.values()), None)
    tools = _run(ensure_tools(cluster.layout, cluster.progress))
    os.environ["KUBECONFIG"] = str(cluster.layout.inside_kubeconfig)
    os.environ["PATH"] = f"{tools.folder}:{os.environ['PATH']}"
    if node is None:
        argv = control_plane_namespaces(cluster.layout).enter_network(*arguments.words)
    else:
        resolver = str(resolver_file(cluster.layout))
        argv = node.namespaces.enter_network(
            "unshare", "--mount", "sh", "-c", WITH_RESOLVER, resolver, *arguments.words
        )
    os.execvp(argv[0], argv)  # noqa: S606 - becoming the command is the point


def _kubectl(arguments: argparse.Namespace, cluster: Cluster) -> int:
    _require_up(cluster)
    tools = _run(ensure_tools(cluster.layout, cluster.progress))
    os.environ["KUBECONFIG"] = str(cluster.layout.kubeconfig)
    os.execv(tools.kubectl, [str(tools.kubectl), *arguments.words])  # noqa: S606 - becoming it is the point


def _require_up(cluster: Cluster) -> None:
    if cluster.intent() is None:
        raise ClusterError(f"cluster {cluster.layout.name} is down: bring it up by `up`")


def _leaves(group: BaseException | None) -> list[BaseException]:
    if isinstance(group, BaseExceptionGroup):
        return [leaf for inner in group.exceptions for leaf in _leaves(inner)]
    return [group] if group is not None else []
