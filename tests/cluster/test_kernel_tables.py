"""The kernel's tables are read right: what is ours, and what must be left alone."""

from pathlib import Path

from e2e.cluster.cgroups import hierarchies
from e2e.cluster.namespaces import mounts_below

MOUNTINFO = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime shared:7 - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
50 27 254:0 /s /home/me/my\\040state/ns rw,relatime - ext4 /dev/vda rw
51 50 0:4 net:[4026532179] /home/me/my\\040state/ns/a.net rw - nsfs nsfs rw
52 27 0:4 net:[4026532180] /home/me/my\\040state-of-another/a.net rw - nsfs nsfs rw
"""


def test_control_group_hierarchies_of_both_versions_are_found_in_any_mount_order() -> None:
    assert hierarchies(MOUNTINFO) == [
        Path("/sys/fs/cgroup/memory"),
        Path("/sys/fs/cgroup/systemd"),
        Path("/sys/fs/cgroup/unified"),
    ]
    assert hierarchies("30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n") == [Path("/sys/fs/cgroup")]


def test_only_mounts_at_and_below_the_folder_are_ours_innermost_first() -> None:
    state = Path("/home/me/my state")
    assert mounts_below(state, MOUNTINFO) == [state / "ns" / "a.net", state / "ns"]
    assert mounts_below(state / "ns" / "a.net", MOUNTINFO) == [state / "ns" / "a.net"]
    assert mounts_below(Path("/home/you"), MOUNTINFO) == []
