"""Plans of a decode step that were changed, run: the same bits, a trace, a time."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from kit.operands.on_gpu import ON_WAVE
from onewave import LLM, SamplingParams
from onewave.base.weight_formats import COMPACT
from onewave.models.config.read import builtin_config
from onewave.models.llama_plan import DecodeStep, deal_decode
from onewave.models.step_plan import StepPlan, plan_of, read_plan

pytestmark = ON_WAVE
MODEL = "llama-3.2-1b"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=3)


def changed(plan: StepPlan) -> StepPlan:
    """Each layer's row blocks of gate_up cut in two, in the other order, and one moved to the neighbour."""
    facts = json.loads(plan.to_json())
    for worker, queue in enumerate(facts["queues"]):
        for at, task in reversed(list(enumerate(queue))):
            name, blocks = task.split()[:2]
            first, _, last = blocks.partition("-")
            if not name.startswith("gate_up") or not last:
                continue
            low, high = int(first), int(last)
            if worker % 2 == 0 and worker + 1 < len(facts["queues"]):
                beside = facts["queues"][worker + 1]
                place = next(i for i, other in enumerate(beside) if other.startswith(f"{name} "))
                beside[place : place + 1] = [beside[place], f"{name} {high}"]
                high -= 1
            queue[at : at + 1] = [f"{name} {high}", f"{name} {low}-{high - 1}"]
    return read_plan(json.dumps(facts).encode())


def text_of(plan: StepPlan, folder: Path) -> Path:
    file = folder / "plan.json"
    file.write_text(plan.to_json())
    return file


def test_a_changed_plan_gives_the_same_tokens_and_log_probabilities(tmp_path: Path) -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for batch in (1, 8):
        step = DecodeStep(builtin_config(MODEL), batch, COMPACT)
        own = plan_of(deal_decode(step, workers=sms - 2), model=MODEL)
        paced = replace(changed(own), ring=own.ring - 1, flight=1, sooner=0)
        outputs = []
        for plan in (None, text_of(paced, tmp_path)):
            options = {"load_format": "dummy", "max_model_len": 512, "max_num_seqs": batch, "plan": plan}
            with LLM(MODEL, **options) as llm:
                assert llm.decode_path == "wave"
                outputs.append([out.outputs[0] for out in llm.generate([[5, 6, 7], [8] * 40], GREEDY)])
        for first, second in zip(*outputs, strict=True):
            assert first.token_ids == second.token_ids
            assert first.logprobs == second.logprobs
