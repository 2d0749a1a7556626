"""Who an attempt is. An instance id is used by one rank of one attempt only, ever (invariant I1)."""

from __future__ import annotations


def instance_id(deployment: str, uid: str, number: int, nonce: str) -> str:
    """Return the base instance id of an attempt.

    It is the submission id, the Ray namespace and the placement group's name too. The number comes from a counter of
    the whole deployment that only grows; the uid tells a deployment from a later one of the same name; the nonce keeps
    ids apart even when the counter was lost with the status. vLLM appends ``_dp<rank>`` where it has several ranks.
    """
    return f"{deployment}-{uid[:8]}-a{number}-{nonce}"
