"""The planned memory of a pass beside what a pass takes."""

from dataclasses import replace

import pytest
from torch.profiler import ProfilerActivity, profile

from kit.models.tiny_decoders import BASE, in_float32, random_model
from onewave.bench.memory.record import trace_of
from onewave.models.activations import plan_pass
from onewave.models.batch import Batch


@pytest.mark.parametrize(
    ("hidden", "intermediate", "heads", "kv_heads", "num_tokens"), [(256, 768, 4, 2, 200), (128, 256, 8, 8, 300)]
)
def test_the_plan_of_a_pass_is_what_the_pass_takes(hidden, intermediate, heads, kv_heads, num_tokens):
    config = replace(
        BASE, hidden_size=hidden, intermediate_size=intermediate, num_heads=heads, num_kv_heads=kv_heads, num_layers=3,
        layer_windows=(None,) * 3,
    )  # fmt: skip
    model = in_float32(random_model(config))
    kv, batch = model.new_row_cache(num_slots=2, capacity=512), Batch.prefill([(0, [7] * num_tokens, 0)], model.device)
    model.forward(batch, kv)
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    profiler.start()
    model.forward(batch, kv)
    profiler.stop()
    found = trace_of(profiler, model.device, "a pass").peak_bytes
    plan = plan_pass(config, num_tokens, 1, model.dtype.itemsize)
    assert 0.95 * found <= plan.live_bytes <= found  # which has operators' own blocks, too
    assert plan.live_bytes <= plan.total_bytes <= 1.25 * plan.live_bytes
