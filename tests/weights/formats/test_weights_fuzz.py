"""Whatever bytes a weight file holds, reading it ends soon, in tensors or in one OnewaveError."""

import struct
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.sample_files import gguf_bytes, safetensors_bytes, small_gguf, small_safetensors
from onewave.base.errors import OnewaveError
from onewave.weights.formats.gguf_store import GGUFStore
from onewave.weights.formats.safetensors_store import SafetensorsStore

pytestmark = pytest.mark.timeout(120)

EXAMPLES = settings(max_examples=400)
EXTREMES = [0, 1, 0x7F, 0x80, 0xFF, 1 << 31, (1 << 32) - 1, 1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


@st.composite
def damaged(draw, original: bytes) -> bytes:
    """Return `original` with a few bytes changed, integers overwritten, pieces cut out or repeated, and its end cut."""
    content = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        kind = draw(st.sampled_from(["byte", "u32", "u64", "cut", "repeat", "end"]))
        if kind == "byte":
            content[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif kind in ("u32", "u64"):
            size = 4 if kind == "u32" else 8
            content[at : at + size] = (draw(st.sampled_from(EXTREMES)) % (1 << 8 * size)).to_bytes(size, "little")
        elif kind == "cut":
            del content[at : at + draw(st.integers(1, 40))]
        elif kind == "repeat":
            content[at:at] = content[at : at + draw(st.integers(1, 40))]
        else:
            del content[at:]
    return bytes(content)


def read_all(open_store, path) -> None:
    """Open a store and read every tensor of it; only an OnewaveError may stop that."""
    message = ""
    try:
        store = open_store(path)
        with warnings.catch_warnings():
            # A damaged scale may well be infinite.
            warnings.simplefilter("ignore", RuntimeWarning)
            for name, info in store.tensors.items():
                assert store.load(name).shape == info.shape
                store.load_quantized(name)
        store.close()
    except OnewaveError as error:
        message = str(error)
    assert "\n" not in message
    message.encode()


def check_gguf(directory, content: bytes) -> None:
    path = directory / "model.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    read_all(GGUFStore.open, path)


def check_safetensors(directory, content: bytes, name: str = "model.safetensors") -> None:
    path = directory / name
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    read_all(SafetensorsStore.open, directory)


@EXAMPLES
@given(content=damaged(small_gguf()))
def test_a_damaged_gguf_file_never_crashes(tmp_path, content):
    check_gguf(tmp_path, content)


@EXAMPLES
@given(content=damaged(small_safetensors()))
def test_a_damaged_safetensors_file_never_crashes(tmp_path, content):
    check_safetensors(tmp_path, content)


@EXAMPLES
@given(tail=st.binary(max_size=200), counts=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_random_bytes_after_a_gguf_preamble_never_crash(tmp_path, tail, counts):
    check_gguf(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, *counts) + tail)
    check_gguf(tmp_path, tail)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
SIZES = st.lists(st.integers(-1, 5) | st.sampled_from(EXTREMES) | JSON, max_size=4)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "BOOL", "I64", "F8_E4M3", "F4", "f32", ""]) | JSON,
        "shape": SIZES | JSON,
        "data_offsets": st.lists(st.integers(0, 24), min_size=2, max_size=2) | SIZES | JSON,
    }
)


@EXAMPLES
@given(
    header=st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), ENTRY | JSON, max_size=4) | JSON,
    data=st.binary(max_size=24),
)
def test_any_json_as_a_safetensors_header_never_crashes(tmp_path, header, data):
    check_safetensors(tmp_path, safetensors_bytes(header, data))


@EXAMPLES
@given(content=st.binary(max_size=200))
def test_random_bytes_as_safetensors_never_crash(tmp_path, content):
    check_safetensors(tmp_path, content)
    check_safetensors(tmp_path, struct.pack("<Q", len(content)) + content)


@EXAMPLES
@given(
    content=damaged(b'{"metadata": {"total_size": 8}, "weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}')
)
def test_a_damaged_index_never_crashes(tmp_path, content):
    check_safetensors(tmp_path, content, "model.safetensors.index.json")


@EXAMPLES
@given(
    type_id=st.integers(0, 50) | st.sampled_from(EXTREMES[:7]),
    dimensions=st.lists(st.integers(0, 300) | st.sampled_from(EXTREMES), max_size=6),
    offset=st.integers(0, 64) | st.sampled_from(EXTREMES),
    data=st.binary(max_size=600),
)
def test_any_tensor_entry_of_a_gguf_never_crashes(tmp_path, type_id, dimensions, offset, data):
    check_gguf(
        tmp_path,
        gguf_bytes(tensors=[("w", tuple(dimensions), type_id % (1 << 32), data)], offsets={"w": offset}),
    )
