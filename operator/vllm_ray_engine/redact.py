"""Secrets are taken out of what ends up in the status, where everybody who may read the resource can read it."""

from __future__ import annotations

import re

HIDDEN = "[redacted]"

_NAME = r"[\w-]*(?:api[_-]?key|secret|passw(?:or)?d|credentials?|(?:access|auth|bearer|hf|hub|session)[_-]?token)[\w-]*"
_VALUE = r"[^\s'\",;)}\]&]+"

_SIGNATURE = r"(?:X-Amz-[\w-]+|sig|signature|token|key|Policy|Key-Pair-Id)"

_SECRETS = (
    # Tokens that are known by their form: Hugging Face, OpenAI, GitHub, NVIDIA, AWS, JSON Web Tokens.
    (re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{8,}|\bsk-[\w-]{8,}"), HIDDEN),
    (re.compile(r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bnvapi-[\w-]{8,}"), HIDDEN),
    (re.compile(r"\bAKIA[0-9A-Z]{16}\b|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), HIDDEN),
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1 {HIDDEN}"),
    # Credentials in a URL, and the signature that makes one a credential itself.
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s:@'\"]*(?::[^/\s@'\"]*)?@"), rf"\1{HIDDEN}@"),
    (re.compile(rf"([?&]{_SIGNATURE}=)[^&\s'\"]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    # Values of what is called a secret: NAME=value, "name": "value", --name value.
    (re.compile(rf"\b({_NAME}['\"]?\s*[=:]\s*['\"\[]*){_VALUE}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(rf"(--{_NAME}\s+['\"]?)(?!-){_VALUE}", re.IGNORECASE), rf"\1{HIDDEN}"),
)


def redact(text: str) -> str:
    """Return the text without what looks like a token, a key, a password or a URL with credentials."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text
