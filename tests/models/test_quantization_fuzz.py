"""Whatever a quantised checkpoint's config and parts say, reading it ends in matrices or in one OnewaveError."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from kit.models.quantized_files import AWQ, FP8, GPTQ, Stored, awq, blocks, compressed, gptq, packed, plain
from onewave.base.errors import OnewaveError
from onewave.models.config.fields import Fields
from onewave.models.config.quantization import read_scheme
from onewave.weights.formats.safetensors_store import SafetensorsStore
from onewave.weights.quantized.store import QuantizedStore

pytestmark = pytest.mark.timeout(120)
EXAMPLES = settings(max_examples=150)
INT4 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=8)
INT8 = compressed("int-quantized", num_bits=8, type="int", strategy="channel")
CONFIGS: list[tuple[dict[str, Any], Stored]] = [
    (GPTQ | {"group_size": 8, "desc_act": True}, gptq(16, 32, group=8, act_order=True)),
    (AWQ | {"group_size": -1}, awq(16, 32)),
    (FP8 | {"weight_block_size": [8, 8]}, blocks(16, 32, block=8)),
    (INT4, packed(16, 32, group=8, sym=False, wide=True)),
    (INT8, plain(16, 32)),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def changed(draw: st.DrawFn) -> Any:
    """A config with a value anywhere in it replaced, taken away or added."""
    config = json.loads(json.dumps(draw(st.sampled_from(CONFIGS))[0]))
    section = config
    while True:
        key = draw(st.sampled_from(sorted(section)))
        if not isinstance(section[key], dict) or not section[key] or draw(st.booleans()):
            break
        section = section[key]
    section[key] = draw(JSON | st.sampled_from([-1, 0, 3, 4, 8, 1 << 40, "gptq", "group", "float", [8, 8], {}]))
    return draw(st.sampled_from([config, {"group_0": config}]))


def one_line(error: OnewaveError) -> None:
    assert "\n" not in str(error)
    str(error).encode()


@EXAMPLES
@given(config=changed() | JSON)
def test_any_quantization_config_is_a_scheme_or_one_error(config: Any) -> None:
    try:
        read_scheme(Fields({"quantization_config": config}, "config.json"))
    except OnewaveError as error:
        one_line(error)


DTYPES = [
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
]


@EXAMPLES
@given(data=st.data())
def test_parts_of_any_shape_kind_and_content_are_a_matrix_or_one_error(tmp_path: Any, data: st.DataObject) -> None:
    config, stored = data.draw(st.sampled_from(CONFIGS))
    scheme = read_scheme(Fields({"quantization_config": config}, "config.json"))
    assert scheme is not None
    tensors = dict(stored.parts)
    for _ in range(data.draw(st.integers(0, 2))):
        part = data.draw(st.sampled_from(sorted(tensors)))
        old = tensors.pop(part)
        how = data.draw(st.sampled_from(["take away", "fill", "draw"]))
        if how == "take away":
            continue
        shape, dtype = list(old.shape), old.dtype
        if how == "draw":
            shape = data.draw(st.lists(st.sampled_from([1, 2, 4, 8, 16]), max_size=3))
            dtype = data.draw(st.sampled_from(DTYPES))
        bits = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 256, (*shape, dtype.itemsize))
        tensors[part] = torch.from_numpy(bits.astype(np.uint8)).view(dtype).reshape(shape)
    file = tmp_path / "model.safetensors"
    file.unlink(missing_ok=True)
    file.write_bytes(save({f"m.{part}": tensor for part, tensor in tensors.items()}))
    try:
        store = QuantizedStore(SafetensorsStore.open(tmp_path), scheme)
        for name, info in store.tensors.items():
            assert tuple(store.load(name).shape) == info.shape
        store.close()
    except OnewaveError as error:
        one_line(error)
