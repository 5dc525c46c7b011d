"""The names that a service will be served under, as labels.

A gateway learns names from pods; but a service that is scaled to zero, or whose first pod still loads, has
none to tell them. What reaches the gateway even then are the labels of the Kubernetes Service, which
Kubernetes copies to its EndpointSlices. A label's value is short and of few characters and a model's name
may be anything, so the names go as base32 of JSON, in as many labels as that takes:

    serving.leadline.io/served-names-0: lmrf…   63 characters at most
    serving.leadline.io/served-names-1: …
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence

import msgspec

from leadline.protocol.isvc import label

__all__ = ["labels_of_names", "names_in_labels"]

_KEY = label("served-names-")
_MOST = 63
"""Characters of a label's value."""
_names = msgspec.json.Decoder(list[str])


def labels_of_names(names: Sequence[str]) -> dict[str, str]:
    """Empty for no names."""
    if not names:
        return {}
    text = base64.b32encode(msgspec.json.encode(list(names))).decode().rstrip("=").lower()
    pieces = [text[start : start + _MOST] for start in range(0, len(text), _MOST)]
    return {f"{_KEY}{number}": piece for number, piece in enumerate(pieces)}


def names_in_labels(labels: Mapping[str, str]) -> list[str]:
    """What `labels_of_names` was given; empty for labels without names, or with what cannot be read."""
    pieces: list[str] = []
    while (piece := labels.get(f"{_KEY}{len(pieces)}")) is not None:
        pieces.append(piece)
    text = "".join(pieces).upper()
    try:
        return _names.decode(base64.b32decode(text + "=" * (-len(text) % 8))) if text else []
    except (binascii.Error, msgspec.DecodeError, UnicodeDecodeError):
        return []
