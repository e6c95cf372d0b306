"""A LLaMA-family decode step as one launch: llama_plan's program with its weights and buffers on a GPU."""

from dataclasses import replace

import torch
from torch import Tensor

from onewave.base.errors import UnsupportedError
from onewave.memory.kv_cache import KVCache
from onewave.models.llama import MATRICES, NORMS, Llama, plain
from onewave.models.llama_plan import DecodeStep, head_groups, plan_program, workers_for
from onewave.wave.launch.launch import AttentionSetup, Wave, co_resident, runs_here
from onewave.wave.plan.operations import HeadGroups
from onewave.wave.weights.pack import Weight, WeightStream, pack_stream
from onewave.wave.weights.row_table import RowTable


def wave_weight(name: str, matrix: Tensor, gain: Tensor | None) -> Weight:
    """A layer's matrix as its operation multiplies by it: gate and up rows take turns."""
    return Weight(tuple(matrix.chunk(2)) if name == "gate_up" else (matrix,), gain)


def wave_weights(model: Llama) -> dict[str, Weight]:
    """The model's matrices by operation, norm gains with them. Raises UnsupportedError for packed (quantised) ones, and
    for those that lie in a stream already."""
    found: dict[str, Weight] = {}
    for index, layer in enumerate(model.weights.layers):
        for name in MATRICES:
            gain = getattr(layer, NORMS[name]) if name in NORMS else None
            found[f"{name}{index}"] = wave_weight(name, plain(getattr(layer, name), "one wave"), gain)
    found["head"] = Weight((plain(model.weights.head, "one wave"),), model.weights.norm)
    return found


def norm_gains(model: Llama) -> Tensor:
    """Stack the gains of all norms before products, in the order of a step: [norms, hidden]."""
    layers = [getattr(layer, norm) for layer in model.weights.layers for norm in NORMS.values()]
    return torch.stack([*layers, model.weights.norm]).contiguous()


class DecodeWave:
    """A model's decode step as one launch, for up to `batch` sequences.

    workers: blocks of the launch, by default as `workers_for` says. delays: a test build that sleeps before tasks.
    stream: where the model's matrices lie already, with the program for `batch` that they were packed for; else they
    are packed here, and lie on the device twice. Raises UnsupportedError.
    """

    def __init__(
        self,
        model: Llama,
        *,
        batch: int,
        workers: int | None = None,
        delays: bool = False,
        stream: WeightStream | None = None,
    ):
        if not runs_here(model.device) or model.dtype not in (torch.bfloat16, torch.float16):
            allowed = "bfloat16 or float16 on a GPU of compute capability 9.0"
            raise UnsupportedError("one wave", got=f"{model.dtype} on {model.device}", allowed=allowed)
        config = model.config
        step = DecodeStep(config, batch)
        self.batch, self.vocab_size, self.device = batch, config.vocab_size, model.device
        if stream is None:
            count = workers or workers_for(step, available=co_resident(model.device))
            program = plan_program(step, workers=count)
            stream = pack_stream(program, wave_weights(model), model.device)
        table = model.weights.embedding
        self._table = table if isinstance(table, RowTable) else None
        # A step's rows of such a table are looked up before it: then these are the kernel's table, its tokens numbers.
        self._rows = torch.zeros(batch, config.hidden_size, dtype=model.dtype, device=model.device)
        self._numbers = torch.arange(batch, device=model.device)
        rows = None if self._table is None else self._rows
        setup = attention_setup(model, head_groups(step), rows)
        if stream.gains_apart:
            setup = replace(setup, gains=norm_gains(model))
        self.wave = Wave(stream, activation="silu", delays=delays, attention=setup)

    def bind_cache(self, kv: KVCache) -> None:
        """Use this cache from now on; `slots` are rows of its block table. Blocks of each size are compiled for. Raises
        ShapeError."""
        scales = None
        if kv.k_scale is not None and kv.v_scale is not None:
            scales = torch.stack((kv.k_scale, kv.v_scale), -1).contiguous()
        self.wave.bind_cache(kv.k, kv.v, kv.block_table, scales=scales)

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Feed one token a sequence: int64 [rows] each. Returns float32 logits [rows, vocab]."""
        logits = torch.empty(len(tokens), self.vocab_size, device=self.device)
        if self._table is not None and len(tokens) <= self.batch:
            self.wave.after_last()
            self._table.look_up(tokens, self._rows[: len(tokens)])
            tokens = self._numbers[: len(tokens)]
        return self.wave.decode(tokens, positions, slots, logits)


def attention_setup(model: Llama, groups: HeadGroups, rows: Tensor | None = None) -> AttentionSetup:
    """Collect what attention reads beside the stream: embedding, rotary angles, biases and norms of all layers.

    rows: to read in the embedding's place.
    """
    config, layers = model.config, model.weights.layers

    def stacked(tensors: list[Tensor | None]) -> Tensor | None:
        there = [tensor.float() for tensor in tensors if tensor is not None]
        return torch.cat(there).contiguous() if there else None

    biases = stacked([layer.qkv_bias for layer in layers])
    embedding = model.weights.embedding if rows is None else rows
    assert isinstance(embedding, Tensor)
    return AttentionSetup(
        layers=len(layers),
        groups=groups,
        embedding=embedding,
        vocab=config.vocab_size,
        rotary=model.rotary.rows,
        biases=model.weights.norm.float() if biases is None else biases,
        q_norm=stacked([layer.q_norm for layer in layers]),
        k_norm=stacked([layer.k_norm for layer in layers]),
        hidden=config.hidden_size,
        eps=config.rms_norm_eps,
        scale=config.head_dim**-0.5,
    )
