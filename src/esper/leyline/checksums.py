"""JSON and safetensors files that contain a sha256 of all their other bytes.

    content = seal_json(body)          # {"sha256":"…", followed by the rest of the object
    document = open_json(content)      # ValueError if any byte has changed
    content = seal_tensors(content)    # canonical header, with the checksum in its metadata
    metadata = check_tensors(content)  # ValueError if any byte has changed

Any JSON or safetensors reader can read the files.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

METADATA = "__metadata__"
"""The only key in a safetensors header that is not a tensor name."""
CHECKSUM = "sha256"
_BLANK = "0" * 64
_JSON = re.compile(rb'\{"sha256":"([0-9a-f]{64})",')
_FIELD = re.compile(rb'"sha256":"([0-9a-f]{64})"')
"""Matches only the checksum: inside a JSON string its quotes would be escaped."""


def seal_json(body: bytes) -> bytes:
    """Return the JSON object with a checksum of the rest as its first field. The object must not be empty."""
    rest = body.lstrip().removeprefix(b"{")
    return b'{"%s":"%s",%s' % (CHECKSUM.encode(), hashlib.sha256(rest).hexdigest().encode(), rest)


def unseal_json(content: bytes) -> bytes:
    """Return the JSON object without its checksum. Raise ValueError if the checksum is missing or does not match."""
    match = _JSON.match(content)
    if match is None:
        raise ValueError("it has no checksum in its first field")
    rest = content[match.end() :]
    if hashlib.sha256(rest).hexdigest().encode() != match[1]:
        raise ValueError("its checksum does not match its content")
    return b"{" + rest


def open_json(content: bytes) -> Any:
    """Return the object that `seal_json` wrote, without its checksum. Raise ValueError if it was changed."""
    return json.loads(unseal_json(content))


def seal_tensors(content: bytes) -> bytes:
    """Return a safetensors file with a canonical header and a checksum of the whole file in its metadata.

    Equal tensors and metadata give equal bytes.
    """
    size = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + size])
    metadata = header.pop(METADATA, {}) | {CHECKSUM: _BLANK}
    text = json.dumps({METADATA: metadata} | header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    blank = len(text).to_bytes(8, "little") + text + content[8 + size :]
    digest = hashlib.sha256(blank).hexdigest()
    return blank.replace(_field(_BLANK), _field(digest), 1)


def check_tensors(content: bytes) -> dict[str, str]:
    """Return the metadata of a file written by `seal_tensors`. Raise ValueError if the file was changed."""
    size = int.from_bytes(content[:8], "little")
    fields = list(_FIELD.finditer(content, 8, min(len(content), 8 + size)))
    if len(fields) != 1:
        raise ValueError("it has no checksum in its metadata")
    start, end = fields[0].span()
    digest = hashlib.sha256(content[:start])
    digest.update(_field(_BLANK))
    digest.update(memoryview(content)[end:])
    if digest.hexdigest().encode() != fields[0][1]:
        raise ValueError("its checksum does not match its content")
    metadata: dict[str, str] = json.loads(content[8 : 8 + size])[METADATA]
    return metadata


def _field(digest: str) -> bytes:
    return f'"{CHECKSUM}":"{digest}"'.encode()
