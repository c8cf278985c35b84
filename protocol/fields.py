"""Types of the fields that records share, with their bounds. Keys are raw Ed25519 public keys, digests are SHA-256."""

from __future__ import annotations

import sys
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-z0-9][a-z0-9._-]*\Z")]
Text = Annotated[str, Meta(max_length=1024)]
Url = Annotated[str, Meta(max_length=256, pattern=r"^https://[!-~]+\Z")]
"""Whoever may be asked something is asked over TLS: a token must never travel in clear."""
_LARGEST: Final = sys.float_info.max
Number = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
"""Any finite number: a bound refuses NaN as well. Every float of a record has two."""
Threshold = Annotated[float, Meta(ge=0, le=_LARGEST)]
"""NaN would let every measurement pass."""
FileName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*\Z")]
PackageText = Annotated[str, Meta(max_length=64, pattern=r"^([A-Za-z0-9][A-Za-z0-9._+!-]*)?\Z")]
"""Name or version of a distribution: goes into commands that a person is told to run."""
ParameterName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-z][a-z0-9_]*\Z")]
_Parameter = (
    Annotated[int, Meta(ge=-(2**53), le=2**53)]
    | Annotated[float, Meta(ge=-1e300, le=1e300)]
    | bool
    | Annotated[str, Meta(max_length=512)]
)
ParameterValue = _Parameter | Annotated[tuple[_Parameter, ...], Meta(max_length=64)]
Outcome = Literal["pass", "fail", "unknown"]
Dtype = Annotated[str, Meta(min_length=1, max_length=16, pattern=r"^[a-z0-9_]+\Z")]


class Spec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the manifest."""
