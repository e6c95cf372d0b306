"""Choice of the Hopper kernel for a call, and its plan.

Whether it takes a call depends on the capability, dtypes, head_dim, options and strides, never on lengths or the
batch: a row's bits depend on the kernel that computes them. `auto` uses it only where a sweep on a GPU has passed
(tuned.json).
"""

from functools import lru_cache

from torch import Tensor

from onewave.ops.attention.hopper.plan import PAGE_SIZES, Schedule, Work, columns_of, config, schedule, swept
from onewave.ops.attention.plan import AttentionChoice, Facts
from onewave.ops.choice import Reason, because

_HOPPER = (9, 0)
# Narrower heads are padded to 64 columns and no faster than with the portable kernel (docs/log/prefill-attention.md).
_NARROWEST = 40
_ALIGNED_BYTES = 16
# TMA's strides are below 2^40 bytes.
_MAX_STRIDE_BYTES = 1 << 40
# gpu/descriptors.py's bound of rows that pages may reach.
_MAX_PAGE_ROWS = 0x7FFF0000


def undescribable(*tensors: Tensor, pages: tuple[Tensor, ...] = ()) -> str | None:
    """Why TMA can't address one of the tensors, None if it can all. pages: [pages, page_size, kv_heads, head_dim]."""
    for tensor in pages:
        page, row = tensor.stride()[:2]
        if len(tensor) > 1 and (row == 0 or page % row or len(tensor) * (page // row) >= _MAX_PAGE_ROWS):
            return f"a page's stride must be a multiple of a row's, not strides {tuple(tensor.stride())}"
    for tensor in (*tensors, *pages):
        if not rows_apart(tensor):
            return f"rows must lie at multiples of 16 bytes and not be expanded, not strides {tuple(tensor.stride())}"
    return None


def rows_apart(tensor: Tensor) -> bool:
    """Whether all rows lie at multiples of 16 bytes, and none is another."""
    if tensor.data_ptr() % _ALIGNED_BYTES and tensor.numel():
        return False
    return _rows_apart(tensor.shape, tensor.stride(), tensor.element_size())


@lru_cache(maxsize=1024)
def _rows_apart(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> bool:
    steps = zip(shape[:-1], strides, strict=False)
    bytes_apart = [step * item_bytes for n, step in steps if n != 1]
    return 0 in shape or all(0 < n < _MAX_STRIDE_BYTES and n % _ALIGNED_BYTES == 0 for n in bytes_apart)


def refusal(facts: Facts) -> str | None:
    """Why the kernel does not take a call, None if it does."""
    if facts.capability != _HOPPER:
        return "the Hopper kernel needs sm_90, and this is sm_{}{}".format(*facts.capability)
    if facts.missing is not None:
        return f"the Hopper kernel needs Triton 3.6's Gluon: {facts.missing}"
    if facts.alibi or facts.bias is not None:
        return "the Hopper kernel has neither ALiBi nor bias"
    if not facts.options.scale > 0:
        return "the Hopper kernel wants a positive scale"
    if facts.page_size is not None and facts.page_size not in PAGE_SIZES:
        return f"the Hopper kernel reads pages of {', '.join(map(str, PAGE_SIZES))} keys, not of {facts.page_size}"
    if facts.strides is not None:
        return f"the Hopper kernel reads through TMA: {facts.strides}"
    if not facts.asked_for and facts.head_dim < _NARROWEST:
        return f"head_dim {facts.head_dim}: below {_NARROWEST} the Hopper kernel, which pads to 64, gains nothing"
    dtype = str(facts.dtype).removeprefix("torch.")
    if not facts.asked_for and not swept(dtype, facts.head_dim):
        return f"the Hopper kernel's sweep on a GPU has not covered {dtype} with head_dim {facts.head_dim}"
    return None


def work_of(facts: Facts) -> Work:
    """The rows and keys to be dealt. Keys that no query sees are left out where lengths are known."""
    options, num_keys = facts.options, facts.num_keys
    if facts.tokens is not None:
        return Work(facts.num_heads, facts.group, facts.tokens, num_keys, 0, options.left, options.right, facts.batch)
    shift = options.shift(facts.num_queries, num_keys)
    if options.right is not None:
        num_keys = min(num_keys, facts.num_queries + shift + options.right)
    heads = facts.num_heads * facts.batch
    return Work(heads, facts.group, facts.num_queries, num_keys, shift, options.left, options.right)


def plan_hopper(facts: Facts, work: Work) -> AttentionChoice:
    """Plan the kernel for a call that `refusal` lets pass."""
    columns = columns_of(facts.head_dim)
    plan = schedule(work, columns=columns, num_sms=facts.device.num_sms, queue=True)
    constants = config(columns, plan.rows)
    warpgroups = constants["WARPGROUPS"]
    reasons = (
        because("head_dim {}" if columns == facts.head_dim else "head_dim {} as {}", facts.head_dim, columns),
        because("sm_90: one warp loads through TMA, {} warpgroups of 64 queries each multiply", warpgroups),
        *why_dealt(plan),
    )
    return AttentionChoice(
        "gluon", "hopper.launch", "attention/hopper/kernel.py: attention_kernel", reasons, 64 * warpgroups,
        constants["BN"], 4 * warpgroups + 1, constants["K_STAGES"], columns, tiles=plan.slots,
        num_programs=plan.programs, descriptors=True, schedule=plan,
    )  # fmt: skip


def why_dealt(plan: Schedule) -> tuple[Reason, ...]:
    """How a Schedule's tiles are dealt."""
    how = because("as many programs as {} of the GPU's SMs share the tiles", plan.programs)
    if plan.order == "sorted":
        sorts = because("a kernel sorts tiles by length first, and a free program takes the next")
        return how, sorts, because("{} heads together", plan.section)
    if plan.work.sequences is not None:
        turns = "as sequences follow, {} heads together, every other turn the other way round"
        return how, because(turns, plan.section)
    if plan.work.right is None:
        return how, because("tiles as long as each other, head by head")
    if plan.order == "table":
        end = f", of the last {plan.section * plan.last} together" if plan.last > 1 else ""
        return how, because("longest rows of {} heads first{}, each to the least busy program", plan.section, end)
    return how, because("longest rows of {} heads first, every other turn the other way round", plan.section)
