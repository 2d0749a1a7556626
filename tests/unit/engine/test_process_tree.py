from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import OPERATOR, wait_for


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=os.environ | {"PYTHONPATH": str(OPERATOR)}, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# Prints the ids of a child and a grandchild; both ignore SIGTERM, and the child ends, so the grandchild is an orphan.
FAMILY = """
import os, signal, subprocess, sys, time
from vllm_ray_engine.processes import process_tree
process_tree.become_subreaper()
code = '''
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('ready', flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
'''
child = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
print(child.stdout.strip(), process_tree.descendants() == [int(child.stdout)], flush=True)
print(process_tree.end_descendants(0.2), process_tree.descendants(), flush=True)
"""


def test_orphans_come_to_the_subreaper_and_are_ended() -> None:
    with start(FAMILY) as process:
        output, _ = process.communicate(timeout=30)
    first, second = output.splitlines()
    grandchild, adopted = first.split()
    assert adopted == "True"
    assert second == "[] []"
    assert not alive(int(grandchild))


def test_child_dies_with_its_parent() -> None:
    child = (
        "import os, sys, time; from vllm_ray_engine.processes import process_tree; "
        "process_tree.die_with_parent(int(sys.argv[1]));"
        "print('bound', flush=True); time.sleep(600)"
    )
    parent = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}, str(os.getpid())], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
time.sleep(600)
"""
    with start(parent) as process:
        assert process.stdout is not None
        pid, bound = process.stdout.readline().split()
        assert bound == "bound"
        assert alive(int(pid))
        process.send_signal(signal.SIGKILL)
        wait_for("the child to die", lambda: not alive(int(pid)))


def test_child_whose_parent_is_gone_already_exits() -> None:
    code = "from vllm_ray_engine.processes import process_tree; process_tree.die_with_parent(1); print('alive')"
    with start(code) as process:
        output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (1, "")


def test_reap_tells_exit_codes_and_signals() -> None:
    code = """
import os, signal, subprocess, sys, time
from vllm_ray_engine.processes import process_tree
first = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
second = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
second.kill()
seen = {}
while len(seen) < 2:
    seen |= process_tree.reap()
    time.sleep(0.01)
first.returncode = second.returncode = 0
print(seen[first.pid], seen[second.pid], process_tree.reap())
"""
    with start(code) as process:
        output, _ = process.communicate(timeout=30)
    assert output.strip() == "3 -9 {}"


# Has multiprocessing start a process that binds itself to this one, from a thread that ends or from the main thread.
SPAWNER = """
import multiprocessing, os, sys, threading, time
from vllm_ray_engine.processes import process_tree

def child(pipe):
    process_tree.die_with_spawner()
    pipe.send(os.getpid())
    time.sleep(600)

def start():
    global process
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child, args=(sender,))
    process.start()
    sender.close()
    print(receiver.recv(), flush=True)

if __name__ == "__main__":
    if sys.argv[2] == "thread":
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    else:
        start()
    print("started", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("thread", ["main", "thread"])
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_spawned_process_lives_as_long_as_its_spawner(method: str, thread: str, tmp_path: Path) -> None:
    (tmp_path / "spawner.py").write_text(SPAWNER)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "spawner.py"), method, thread], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(OPERATOR)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert process.stdout.readline() == "started\n"
        # The kernel's signal would have come by the end of the thread, before its join returned.
        assert alive(pid)
        process.send_signal(signal.SIGKILL)
        wait_for("the spawned process to die", lambda: not alive(pid))


def test_process_that_nobody_spawned_is_bound_to_nobody() -> None:
    with start(
        "from vllm_ray_engine.processes import process_tree; process_tree.die_with_spawner(); print('alive')"
    ) as process:
        output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "alive\n")
