"""What a loaded image pushes out of a node's store."""

from __future__ import annotations

import pytest

from e2e.cluster.containerd import outdated_by

STORED = {"localhost/engine:1": "d1", "sha256:c1": "d1", "localhost/operator:1": "d2", "localhost/pause:1": "d3"}


@pytest.mark.parametrize(
    ("names", "stored", "outdated"),
    [
        ({"localhost/engine:2"}, STORED, ["localhost/engine:1", "sha256:c1"]),
        ({"localhost/engine:1"}, STORED, []),
        ({"localhost/other:1"}, STORED, []),
        ({"localhost/engine:2"}, {}, []),
        ({"localhost/engine:2"}, {**STORED, "localhost/engine:2": "d1"}, []),
    ],
    ids=["another tag", "the same", "another repository", "an empty store", "another tag of the same content"],
)
def test_only_older_versions_of_the_same_image_go(names: set[str], stored: dict[str, str], outdated: list[str]) -> None:
    assert outdated_by(names, stored) == outdated
