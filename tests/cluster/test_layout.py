"""Names and folders of clusters."""

from pathlib import Path

import pytest

from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout


def test_state_goes_to_the_cache_and_binaries_are_shared() -> None:
    one, two = (Layout.of(name, cache=Path("/home/me/.cache/x")) for name in ("one", "two"))
    assert one.state == Path("/home/me/.cache/x/cluster/one")
    assert two.state == Path("/home/me/.cache/x/cluster/two")
    assert one.binaries == two.binaries


@pytest.mark.parametrize("name", ["", "Upper", "-a", "a-", "a" * 21, "a/b", "a b", "1a"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="cluster name"):
        Layout.of(name, cache=Path("/home/me"))


@pytest.mark.parametrize("state", ["/run/x", "/var/lib/jenkins/x", "/var/log/x", "/var/run/x"])
def test_folders_that_nodes_hide_are_refused(state: str) -> None:
    with pytest.raises(ClusterError, match="--state-dir"):
        Layout.of("vro", state=Path(state), cache=Path("/home/me"))
    with pytest.raises(ClusterError, match="XDG_CACHE_HOME"):
        Layout.of("vro", state=Path("/home/me/state"), cache=Path(state))
