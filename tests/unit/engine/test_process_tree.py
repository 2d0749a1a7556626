from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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
from vllm_ray_engine import process_tree
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
        "import os, sys, time; from vllm_ray_engine import process_tree; "
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
    code = "from vllm_ray_engine import process_tree; process_tree.die_with_parent(1); print('alive')"
    with start(code) as process:
        output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (1, "")


def test_reap_tells_exit_codes_and_signals() -> None:
    code = """
import os, signal, subprocess, sys, time
from vllm_ray_engine import process_tree
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


# A process is started by a thread that ends, binds itself to the process of that thread, and says so.
THREADED = """
import os, subprocess, sys, threading, time
def start():
    global child
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
thread = threading.Thread(target=start)
thread.start()
thread.join()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_child_outlives_the_thread_that_started_it_but_not_the_process() -> None:
    child = (
        "import sys, time; from vllm_ray_engine import process_tree; process_tree.die_with_parent(int(sys.argv[1])); "
        "print('bound', flush=True); time.sleep(600)"
    )
    with start(THREADED, child) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        # The kernel's signal would have come by the end of the thread, before its join returned.
        assert alive(pid)
        process.send_signal(signal.SIGKILL)
        wait_for("the child to die", lambda: not alive(pid))
