"""Engines on two GPUs of one process: each decodes where its weights lie, and with what it recorded there."""

from pathlib import Path

import pytest
import torch

from kit.models.dummy import ON_GPU, write_config
from onewave import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PROMPTS = [[1, 2, 3], [4] * 50, [5, 6], [8, 9, 10, 11]]


@pytest.mark.parametrize("decode", ["graph", "auto"])
def test_both_gpus_give_the_same_tokens(tmp_path: Path, decode: str) -> None:
    write_config(tmp_path, **ON_GPU)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    # Both at once, so that the second one records while the first one's graphs are kept.
    with (
        LLM(tmp_path, device="cuda:0", load_format="dummy", max_num_seqs=4, decode=decode) as here,
        LLM(tmp_path, device="cuda:1", load_format="dummy", max_num_seqs=4, decode=decode) as there,
    ):
        assert here.decode_path == there.decode_path
        found = [[each.outputs[0].token_ids for each in llm.generate(PROMPTS, params)] for llm in (there, here, there)]
    assert found[0] == found[1] == found[2]
    assert torch.cuda.current_device() == 0
