"""Models whose matrices lie in a wave's stream: the same model, and never there twice."""

import threading
import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.models.tiny_decoders import BASE, DUMMY, LOCATION, STORED, in_float32, logits_of
from onewave.base.errors import UnsupportedError
from onewave.engine.load import streamed
from onewave.engine.load.checkpoint import ModelParts, load_model, open_parts
from onewave.engine.load.streamed import StreamedModel, layer_matrices, stream_model
from onewave.models import llama
from onewave.models.config.model_config import ModelConfig
from onewave.models.decode_wave import wave_weights
from onewave.models.llama import LayerWeights, Llama, LlamaWeights
from onewave.models.llama_plan import DecodeStep, plan_decode
from onewave.wave.plan.program import WaveProgram
from onewave.wave.weights import pack
from onewave.wave.weights.formats import plain

CPU = torch.device("cpu")
FAMILIES = STORED | {"norms of q and k": replace(BASE, qk_norm=True)}


def plain_model(config: ModelConfig) -> Llama:
    return load_model(LOCATION, config, DUMMY)


def streamed_model(config: ModelConfig, wrap: Any = lambda parts: parts, **more: Any) -> StreamedModel:
    program: WaveProgram = plan_decode(DecodeStep(config), workers=3).program
    with open_parts(LOCATION, config, DUMMY) as parts:
        return stream_model(wrap(parts), config, program, DUMMY, **more)


def folded(model: Llama) -> Llama:
    """The same model with its gains in its matrices, rounded with them."""

    def into(matrix: Tensor, gain: Tensor) -> Tensor:
        return (matrix.float() * gain.float()).half()

    ones = torch.ones_like(model.weights.norm)
    layers = tuple(
        LayerWeights(
            **{
                **vars(layer),
                "qkv": into(layer.qkv, layer.input_norm),
                "gate_up": into(layer.gate_up, layer.post_norm),
                "input_norm": ones,
                "post_norm": ones,
            }
        )
        for layer in model.weights.layers
    )
    w = model.weights
    tied = w.head is w.embedding
    head, norm = (w.head, w.norm) if tied else (into(w.head, w.norm), ones)
    return Llama(model.config, LlamaWeights(w.embedding, layers, norm, head), max_model_len=64)


@pytest.mark.parametrize("family", FAMILIES)
def test_unpacked_matrices_give_the_plain_models_bits_once_its_gains_are_in_them(family: str) -> None:
    config = FAMILIES[family]
    expected = logits_of(folded(plain_model(config)))
    found = logits_of(streamed_model(config).model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stream_is_what_packing_the_plain_model_gives(family: str) -> None:
    made = streamed_model(FAMILIES[family])
    plain = pack.pack_stream(made.stream.program, wave_weights(plain_model(FAMILIES[family])), CPU).tensor
    assert torch.equal(made.stream.tensor, plain)


def test_gains_in_the_matrices_cost_no_accuracy() -> None:
    plain = plain_model(BASE)
    right = logits_of(in_float32(plain))
    for found, ordinary, exact in zip(logits_of(streamed_model(BASE).model), logits_of(plain), right, strict=True):
        assert (found - exact).norm() <= 1.5 * (ordinary - exact).norm() + 1e-3 * exact.norm()


def test_a_large_head_is_unpacked_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    part_bytes = [pack._PART_BYTES]

    # Exact sums, which do not follow the matrix's height as those of a processor's own product do.
    def exact(x: Tensor, head: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        assert bias is None
        with monkeypatch.context() as patch:
            patch.setattr(pack, "_PART_BYTES", part_bytes[-1])
            parts = [part.clone() for _, part in head.parts()]
        assert len(parts) == (1 if len(part_bytes) == 1 else 14)
        return (x.double() @ torch.cat(parts).double().T).to(out_dtype or x.dtype)

    monkeypatch.setattr(llama, "linear", exact)  # the head's alone
    made = streamed_model(BASE)
    expected = logits_of(made.model)
    part_bytes.append(10 * 128 * 2)
    for found, whole in zip(logits_of(made.model), expected, strict=True):
        assert torch.equal(found, whole)


class Watched:
    """Parts that remember which of the matrices they made are still there."""

    def __init__(self, parts: ModelParts):
        self.parts, self.lock = parts, threading.Lock()
        self.alive: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __getattr__(self, name: str) -> Any:
        made = getattr(self.parts, name)
        return self._watch(made) if name in ("matrix", "head") else made

    def _watch(self, make: Any) -> Any:
        def watched(*arguments: Any) -> Tensor:
            found = make(*arguments)
            with self.lock:
                self.alive.append(weakref.ref(found))
                self.most = max(self.most, sum(t.nbytes for t in (ref() for ref in self.alive) if t is not None))
            return found

        return watched


def test_a_matrix_is_let_go_as_soon_as_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(BASE, num_layers=12, layer_windows=(None,) * 12)
    sizes = {name: 2 * height * cols * count for name, (height, cols, count) in layer_matrices(config).items()}
    padding = 2 * plan_decode(DecodeStep(config), workers=3).program.stream_tiles * 8192
    padding -= 12 * sum(sizes.values()) + 2 * config.vocab_size * config.hidden_size
    watched: list[Watched] = []

    def watch(parts: ModelParts) -> Any:
        watched.append(Watched(parts))
        return watched[0]

    for layers_of_room in (0, 2):
        watched.clear()
        monkeypatch.setattr(streamed, "_ROOM_BYTES", padding + layers_of_room * sum(sizes.values()))
        made = streamed_model(config, watch)
        limit = max(max(sizes.values()), layers_of_room * sum(sizes.values()))
        assert 0 < watched[0].most <= limit
        assert len(watched[0].alive) == 1 + 4 * 12
        assert not any(ref() is not None for ref in watched[0].alive)
        assert made.stream.names[-1] == "head"


def test_progress_reaches_what_the_stream_holds() -> None:
    told: list[int] = []
    made = streamed_model(BASE, report=told.append)
    assert told == sorted(told)
    assert told[-1] == sum(len(entries) for entries in made.stream.program.stream.values()) * 16384


def test_a_tile_that_was_packed_wrong_is_noticed_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    right = plain.tile_images

    def wrong(rows: Tensor, shape: Any) -> Tensor:
        return right(rows, shape).flip(1)

    monkeypatch.setattr(plain, "tile_images", wrong)
    with pytest.raises(UnsupportedError, match="read back otherwise"):
        streamed_model(BASE)


def test_a_failing_checkpoint_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ModelParts, index: int, name: str) -> Tensor:
        raise OSError("the disk is gone")

    monkeypatch.setattr(ModelParts, "matrix", broken)
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(OSError, match="the disk is gone"))
        streamed_model(BASE)


def test_matrices_in_a_stream_are_not_packed_again() -> None:
    with pytest.raises(UnsupportedError, match="in a stream"):
        wave_weights(streamed_model(BASE).model)
