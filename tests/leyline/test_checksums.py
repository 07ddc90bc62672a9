"""Test embedded checksums: any changed byte is detected, and standard readers still read the file."""

import json

import numpy as np
import pytest
from safetensors.numpy import load, save

from esper.leyline.checksums import check_tensors, open_json, seal_json, seal_tensors

DOCUMENT = {"status": "finished", "sha256_of_data": "0" * 64, "nested": {"sha256": "1" * 64}}


def test_sealed_json_is_json_with_one_more_field():
    content = seal_json(json.dumps(DOCUMENT, indent=2).encode() + b"\n")
    assert json.loads(content) == DOCUMENT | {"sha256": json.loads(content)["sha256"]}
    assert open_json(content) == DOCUMENT


def test_sealed_json_rejects_every_flipped_bit_and_truncation():
    content = seal_json(json.dumps(DOCUMENT).encode())
    for place in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            with pytest.raises(ValueError, match="checksum"):
                open_json(bytes(damaged))
        with pytest.raises(ValueError, match="checksum"):
            open_json(content[:place])
    with pytest.raises(ValueError, match="checksum"):
        open_json(content + b" ")
    with pytest.raises(ValueError, match="no checksum"):
        open_json(json.dumps(DOCUMENT).encode())


ARRAYS = {"b": np.arange(5, dtype=np.float32), "a": np.eye(2), "sha256": np.zeros(3, dtype=np.uint8)}


def test_sealed_tensors_are_safetensors_in_canonical_order():
    metadata = {"format": "x", "about": json.dumps({"sha256": "0" * 64}), "z": "1"}
    contents = {seal_tensors(save(ARRAYS, metadata)) for _ in range(20)}
    contents |= {seal_tensors(save(dict(reversed(ARRAYS.items())), dict(reversed(metadata.items()))))}
    assert len(contents) == 1
    content = contents.pop()
    checked = check_tensors(content)
    assert {name: value for name, value in checked.items() if name != "sha256"} == metadata
    assert {name: array.tolist() for name, array in load(content).items()} == {
        name: array.tolist() for name, array in ARRAYS.items()
    }
    assert seal_tensors(content) == content


def test_sealed_tensors_reject_every_flipped_bit_and_truncation():
    content = seal_tensors(save(ARRAYS, {"format": "x"}))
    for place in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            with pytest.raises(ValueError, match="checksum"):
                check_tensors(bytes(damaged))
        with pytest.raises(ValueError, match="checksum"):
            check_tensors(content[:place])
    with pytest.raises(ValueError, match="checksum"):
        check_tensors(content + b"\0")
    with pytest.raises(ValueError, match="no checksum"):
        check_tensors(save(ARRAYS))
