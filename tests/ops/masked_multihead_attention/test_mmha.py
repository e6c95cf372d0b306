"""masked_multihead_attention against an independent NumPy model: the reference, and the kernel (interpreted on CPU)."""

import numpy as np
import pytest
import torch

from kit.numpy_gpu.mmha_model import quantise_in_numpy
from kit.operands.mmha import DTYPES, ENGINES, EXACTEST, Case, bits, kernel, reference
from kit.operands.random import DEVICE
from kit.operands.random import randn_here as randn

pytestmark = [pytest.mark.pairs, *([pytest.mark.gpu] if DEVICE == "cuda" else [])]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("style", "integers"), [("neox", False), ("interleaved", True)])
def test_every_step_in_its_order_equals_the_model(engine, dtype, packed, style, integers):
    case = Case([0, 1, 22, 7, 16], dtype=dtype).with_everything(style=style, integers=integers)
    case.check(engine, packed=packed)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 16), (4, 4, 40), (7, 1, 80), (9, 3, 64), (4, 2, 128), (2, 1, 256)]
)
def test_any_heads_and_head_dim(engine, heads, kv_heads, head_dim):
    Case([5, 0, 23], heads, kv_heads, head_dim).with_everything().check(engine)


@pytest.mark.skipif(DEVICE == "cuda", reason="of a CPU")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 2), (4, 2, 4), (7, 1, 20), (4, 4, 254)])
def test_a_cpu_takes_any_even_head_dim(heads, kv_heads, head_dim):
    Case([5, 0, 23], heads, kv_heads, head_dim).with_everything().check(reference)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("packed", [False, True])
def test_histories_around_a_block(engine, packed):
    case = Case([0, 1, 127, 128, 129, 255, 256], 2, 1, 16, capacity=257)
    case.check(engine, packed=packed, steps_per_block=128)


@pytest.mark.parametrize("steps", [1, 16, 64, 100, 1000])
def test_any_number_of_steps_a_block_gives_the_same_to_rounding(steps):
    histories = [0, 1, 5] if steps == 1 else [0, 1, 15, 16, 33]
    case = Case(histories, 4, 2, 32, capacity=max(histories) + 1, dtype=EXACTEST).with_everything()
    case.check("kernel", steps_per_block=steps)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_step_returns_v_exactly(engine, dtype):
    case = Case([0, 0, 0], dtype=dtype)
    out, _, _ = case.run(engine, scale=37.0)
    v = case.qkv[:, case.heads + case.kv_heads :]
    assert torch.equal(out, v.repeat_interleave(case.heads // case.kv_heads, 1))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rounding", ["half_even", "half_away"])
@pytest.mark.parametrize(("max_bound", "min_bound"), [(127.0, -127.0), (127.0, -128.0), (100.0, -7.0)])
def test_int8_output_is_the_models_bit_for_bit(engine, rounding, max_bound, min_bound):
    case = Case([0, 1, 22, 7], dtype=EXACTEST).with_everything(integers=True)
    case.seq_lens = case.seq_lens.to(torch.int32)
    given = {"out_scale": 0.8, "quant_round": rounding, "quant_max_bound": max_bound, "quant_min_bound": min_bound}
    out, _, _ = case.run(engine, **given)
    exact, _, _ = case.run(engine, dtype=torch.float32)
    own = quantise_in_numpy(exact.double().cpu().numpy(), 0.8, rounding, max_bound, min_bound)
    assert out.dtype is torch.int8
    assert np.array_equal(out.cpu().numpy(), own)
    assert {int(max_bound), int(min_bound)} <= set(out.flatten().tolist())
    if EXACTEST is torch.float32:
        assert np.array_equal(out.numpy(), quantise_in_numpy(case.model()[0], 0.8, rounding, max_bound, min_bound))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rounding", ["half_even", "half_away"])
def test_halves_are_rounded_as_asked(engine, rounding):
    case = Case([0], heads=2, kv_heads=1, head_dim=256)
    halves = torch.arange(-128, 128) / 2
    case.qkv[0, 3] = halves.to(case.dtype)
    # Shift and smooth move the halves beyond both bounds: (h + 0.5) * 2.5 has fractions of a quarter, half and none.
    shift, smooth = torch.full((2, 256), 0.5, device=DEVICE), torch.full((2, 256), 2.5, device=DEVICE)
    smooth[1] = 1.0
    out, _, _ = case.run(
        engine, out_scale=1 / 64, quant_max_bound=64.0, quant_min_bound=-64.0, quant_round=rounding, out_shift=shift,
        out_smooth=smooth,
    )  # fmt: skip
    right = quantise_in_numpy(((halves + 0.5) * smooth.cpu()).double().numpy(), 1 / 64, rounding, 64.0, -64.0)
    assert np.array_equal(out[0].cpu().numpy(), right)


def test_rounding_away_leaves_the_number_below_a_half_below():
    from onewave.ops.masked_multihead_attention.reference import quantise

    below = float(np.nextafter(np.float32(0.5), np.float32(0)))
    x = torch.tensor([below, -below, 0.5, -0.5, 1.5, 2.5])
    assert quantise(x, 1.0, 1.0, -1.0, half_away=True).tolist() == [0, 0, 1, -1, 1, 1]
    assert quantise(x, 1 / 127, 127.0, -127.0, half_away=False).tolist() == [0, 0, 0, 0, 2, 2]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("packed", [False, True])
def test_finished_rows_and_negative_lengths_leave_cache_and_output_alone(engine, packed):
    case = Case([5, 7, -1, 9])
    case.options = {"finished": torch.tensor([False, True, False, False], device=DEVICE)}
    given = randn(4, 6, 32, seed=11, dtype=case.dtype)
    out = given.clone()
    assert case.run(engine, packed=packed, out=out)[0] is out
    _, k, v = case.run(engine, packed=packed)
    for row in (1, 2):
        assert torch.equal(out[row], given[row])
        assert torch.equal(bits(k)[row], bits(case.k)[row])
        assert torch.equal(bits(v)[row], bits(case.v)[row])
    right = case.model()[0]
    assert np.abs(out.double().cpu().numpy() - right)[[0, 3]].max() < 2e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_a_finished_row_without_out_is_zero(engine):
    case = Case([5, 7])
    out, _, _ = case.run(engine, finished=torch.tensor([False, True], device=DEVICE))
    assert out[0].any()
    assert not out[1].any()


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    case = Case([300, 5, 131], head_dim=64, capacity=320).with_everything()
    whole, _, _ = case.run("kernel", steps_per_block=64)
    mine = ("rotary", "src_mask")
    for row in range(3):
        pick = slice(row, row + 1)
        options = {name: value[pick] if name in mine else value for name, value in case.options.items()}
        tensors = (case.qkv[pick], case.k[pick].clone(), case.v[pick].clone(), case.seq_lens[pick])
        assert torch.equal(kernel(*tensors, steps_per_block=64, **options), whole[pick])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_finished_row_may_have_any_length(engine):
    case = Case([5, 7])
    case.seq_lens[1] = 10**6
    out, _, _ = case.run(engine, finished=torch.tensor([False, True], device=DEVICE))
    assert not out.isnan().any()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_result_takes_the_form_of_qkv(engine):
    case = Case([5, 7])
    plain, _, _ = case.run(engine)
    assert torch.equal(case.run(engine, qkv=case.qkv[:, None])[0], plain[:, None])
    assert torch.equal(case.run(engine, qkv=case.qkv.flatten(1))[0], plain.flatten(1))
    out = torch.zeros_like(plain.flatten(1))
    case.run(engine, qkv=case.qkv.flatten(1), out=out)
    assert torch.equal(out, plain.flatten(1))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cache_in_one_tensor_is_two_views_of_it(engine):
    case = Case([5, 7])
    both = torch.stack((case.k, case.v))
    function = kernel if engine == "kernel" else reference
    out = function(case.qkv, *both.unbind(0), case.seq_lens)
    plain, k, v = case.run(engine)
    assert torch.equal(out, plain)
    assert torch.equal(bits(both), bits(torch.stack((k, v))))


@pytest.mark.parametrize("engine", ENGINES)
def test_strided_operands_give_the_same_bits(engine):
    case = Case([5, 7]).with_everything()
    plain, k, v = case.run(engine)
    strided = [torch.empty(2, 24, 2, 65, dtype=case.dtype, device=DEVICE).transpose(1, 2)[..., :32] for _ in "kv"]
    for cache, source in zip(strided, (case.k, case.v), strict=True):
        cache.copy_(source)
    function = kernel if engine == "kernel" else reference
    case.options["bias"] = case.options["bias"].t().contiguous().t()
    assert torch.equal(
        function(case.qkv.transpose(0, 1).contiguous().transpose(0, 1), *strided, case.seq_lens, **case.options), plain
    )
    assert torch.equal(bits(strided[0].contiguous()), bits(k))
    assert torch.equal(bits(strided[1].contiguous()), bits(v))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("keys", [8, 24, 100])
def test_one_mask_for_all_heads_of_any_sufficient_length(engine, keys):
    case = Case([5, 7], options={"src_mask": randn(2, 1, 1, keys, seed=5)})
    case.options["src_mask"][1, :, :, :3] = -float("inf")
    case.check(engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_head_that_may_see_nothing_gives_zero(engine):
    case = Case([5, 40], capacity=41)
    mask = torch.zeros(2, 6, 1, 41, device=DEVICE)
    mask[1, 4] = -float("inf")
    mask[0, 2, 0, :5] = -float("inf")
    case.options = {"src_mask": mask}
    out, _, _ = case.run(engine, steps_per_block=16)
    assert not out[1, 4].any()
    # Only the new token is left.
    assert torch.equal(out[0, 2], case.qkv[0, 8])
    case.check(engine, steps_per_block=16)
