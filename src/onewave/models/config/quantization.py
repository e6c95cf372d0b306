"""The quantisation of a Hugging Face checkpoint, from its config.json.

Sources: transformers' utils/quantization_config.py; compressed-tensors' quantization/quant_args.py and quant_config.py.
"""

import re
from collections.abc import Callable, Mapping
from typing import cast

from onewave.models.config.fields import Fields
from onewave.weights.quantized.scheme import Activations, Packing, Scheme, Sharing

_NEXT = "Use the model's unquantised checkpoint or a GGUF of it."
_BITS = (4, 8)
# compressed-tensors' formats: whether their codes are packed into words.
_FORMATS = {"pack-quantized": True, "int-quantized": False, "float-quantized": False, "naive-quantized": False}
_E4M3 = ("F8_E4M3",)
_LARGEST_OF_KV = {"float8": 448.0, "int8": 127.0}
_STRATEGIES = ("tensor", "channel", "group", "block")


def read_scheme(fields: Fields) -> Scheme | None:
    """How a config.json's model is quantised; None where it is not. Raises ConfigError, UnsupportedError."""
    section = _section(fields)
    return None if section is None else scheme_of(section)


def scheme_of(section: Fields) -> Scheme:
    """How a `quantization_config` quantises. Raises ConfigError, UnsupportedError."""
    method = section.text("quant_method")
    reader = None if method is None else _METHODS.get(method)
    if method is None or reader is None:
        raise section.unsupported("quant_method", method or "missing", ", ".join(_METHODS), next=_NEXT)
    return reader(section)


def read_largest_of_kv(fields: Fields) -> float:
    """The number that a stored scale of keys or values makes of the largest one: 448 for e4m3, 127 for int8.

    Raises ConfigError, UnsupportedError.
    """
    section = _section(fields)
    if section is None or section.values.get("kv_cache_scheme") == "static":  # AutoFP8's word
        return _LARGEST_OF_KV["float8"]
    scheme = section.section("kv_cache_scheme")
    if scheme is None:
        return _LARGEST_OF_KV["float8"]
    kind = f"{scheme.text('type') or 'float'}{scheme.integer('num_bits')}"
    if kind not in _LARGEST_OF_KV or not scheme.flag("symmetric", default=True):
        got = kind if kind not in _LARGEST_OF_KV else f"{kind} with zero points"
        raise scheme.unsupported("type", got, "float8, int8, symmetric", next="Use kv_cache_dtype='auto'.")
    return _LARGEST_OF_KV[kind]


def _section(fields: Fields) -> Fields | None:
    return fields.section("quantization_config") or fields.section("compression_config")


def _gptq(section: Fields) -> Scheme:
    key = "checkpoint_format" if section.has("checkpoint_format") else "format"  # transformers 5 knows both
    form = (section.text(key) or "gptq").lower()
    if form not in ("gptq", "gptq_v2"):
        raise section.unsupported(key, form, "gptq, gptq_v2", next=_NEXT)
    if section.flag("is_marlin_format", default=False):
        raise section.unsupported("is_marlin_format", True, "false", next=_NEXT)
    packing = Packing.GPTQ if form == "gptq" else Packing.GPTQ_V2
    act_order = section.flag("desc_act", default=False)
    kinds = dict.fromkeys(_kind(each) for each in (section, *_overrides(section)))
    return Scheme("gptq", packing, tuple(kinds), act_order)


def _kind(section: Fields) -> tuple[int, Sharing]:
    return _bits(section, "bits"), _group(section)


def _overrides(section: Fields) -> list[Fields]:
    """Return the section as each rule of GPTQModel's `dynamic` changes it. A rule that begins with "-:" names modules
    that are not quantised, and is left out."""
    rules = section.section("dynamic")
    if rules is None:
        return []
    found = [rules.section(name) for name in rules.values if not name.startswith("-:")]
    return [Fields({**section.values, **rule.values}, rule.source, rule.prefix) for rule in found if rule is not None]


def _awq(section: Fields) -> Scheme:
    key = "version" if section.has("version") else "format"
    version = (section.text(key) or "gemm").lower()
    if version != "gemm":
        raise section.unsupported(key, version, "gemm", next=_NEXT)
    bits = _bits(section, "bits" if section.has("bits") else "w_bit")
    if bits != 4:
        raise section.unsupported("bits", bits, "4", next=_NEXT)
    group = _group(section, "group_size" if section.has("group_size") else "q_group_size")
    return Scheme("awq", Packing.AWQ, ((bits, group),))


def _fp8(section: Fields) -> Scheme:
    form = section.text("fmt") or "e4m3"
    if form not in ("e4m3", "float8_e4m3fn"):
        raise section.unsupported("fmt", form, "e4m3", next=_NEXT)
    block = section.items("weight_block_size")
    asked = section.text("activation_scheme") or "dynamic"
    if asked not in ("dynamic", "static"):
        raise section.unsupported("activation_scheme", asked, "dynamic, static", next=_NEXT)
    if block is None:
        kinds = ((8, Sharing(None, None)), (8, Sharing(1, None)))
        activations = Activations.STATIC if asked == "static" else Activations.BY_TOKEN
        return Scheme("fp8", Packing.PLAIN, kinds, activations=activations, codes=_E4M3)
    kinds = ((8, _block(section, "weight_block_size")),)
    return Scheme("fp8", Packing.BLOCKS, kinds, not_followed=f"{asked} e4m3 by groups of columns", codes=_E4M3)


def _fbgemm_fp8(section: Fields) -> Scheme:
    kinds, bound = ((8, Sharing(1, None)),), "e4m3 with a bound of scales"
    return Scheme("fbgemm_fp8", Packing.PLAIN, kinds, not_followed=bound, codes=_E4M3)


def _compressed_tensors(section: Fields) -> Scheme:
    for key in ("sparsity_config", "transform_config"):
        other = section.section(key)
        form = None if other is None else other.values.get("format", "given")
        if form not in (None, "dense"):
            raise section.unsupported(key, form, "none", next=_NEXT)
    groups = section.section("config_groups")
    if groups is None and section.section("kv_cache_scheme") is None:
        raise section.refuse("config_groups", "one group of modules or more")
    found: dict[bool, list[Fields]] = {}
    asked: list[Activations | str | None] = []
    for name in () if groups is None else groups.values:
        assert groups is not None
        group = groups.section(name)
        if group is None:
            raise groups.refuse(name, "an object")
        weights = group.section("weights")
        if weights is None:
            if "weights" in group.values:  # attention's own activations
                continue
            raise group.refuse("weights", "an object")
        form = group.text("format") or section.text("format") or "missing"
        if form not in _FORMATS:
            raise section.unsupported("format", form, ", ".join(_FORMATS), next=_NEXT)
        found.setdefault(_FORMATS[form], []).append(weights)
        asked.append(_activations(group, weights))
    activations, not_followed = _one_of(asked)
    beside: Scheme | None = None
    for packed, those in found.items() or [(False, [])]:
        beside = Scheme(
            "compressed-tensors",
            Packing.PACKED if packed else Packing.PLAIN,
            tuple(dict.fromkeys(_weights(weights, packed=packed) for weights in those)),
            any(str(weights.values.get("actorder")).lower() in ("group", "dynamic", "true") for weights in those),
            activations,
            not_followed,
            zero_points=bool(those) and not any(weights.flag("symmetric", default=True) for weights in those),
            codes=("I32",) if packed else tuple(dict.fromkeys(map(_plain_codes, those))),
            beside=beside,
        )
    assert beside is not None
    return beside


def _activations(group: Fields, weights: Fields) -> Activations | str | None:
    """Return the activations that one group of compressed-tensors' config asks for, in words where unsupported.

    A scale for all tokens of a batch becomes one for each, which the batch does not change; vLLM does so, too.
    """
    given = group.section("input_activations")
    if given is None:
        return None
    kind, bits, strategy = given.text("type") or "int", given.integer("num_bits"), given.text("strategy") or "tensor"
    dynamic, symmetric = given.values.get("dynamic") or False, given.flag("symmetric", default=True)
    plain = (
        weights.text("type") or "int",
        weights.text("strategy") or "tensor",
        weights.flag("symmetric", default=True),
    )
    fits = plain in ((kind, "tensor", True), (kind, "channel", True)) and weights.integer("num_bits") == bits == 8
    if fits and symmetric and dynamic is True and strategy in ("token", "tensor"):
        return Activations.BY_TOKEN
    if fits and symmetric and dynamic is False and strategy == "tensor":
        return Activations.STATIC
    words = f"{'static' if dynamic is False else 'dynamic'} {kind}{bits} by {strategy}"
    return words + ("" if symmetric else " with zero points")


def _one_of(asked: list[Activations | str | None]) -> tuple[Activations | None, str | None]:
    """Return the activations that all groups ask for, or in words what is unsupported."""
    if len(set(asked)) > 1:
        return None, "something else in each group of modules"
    only = asked[0] if asked else None
    return (None, only) if isinstance(only, str) else (only, None)


def _weights(weights: Fields, *, packed: bool) -> tuple[int, Sharing]:
    """Return the bits and the sharing of scales of one group's matrices in compressed-tensors' config."""
    kind = weights.text("type") or "int"
    bits = _bits(weights, "num_bits")
    if kind not in ("int", "float") or (kind == "float" and (bits != 8 or packed)) or (bits == 4 and not packed):
        stored = "packed" if packed else "plain"
        raise weights.unsupported("type", f"{stored} {kind}{bits}", "packed int4 or int8, plain int8 or float8", _NEXT)
    strategy = weights.text("strategy") or ("group" if weights.has("group_size") else "tensor")
    if strategy == "group":
        return bits, _group(weights)
    if strategy == "block":
        return bits, _block(weights, "block_structure")
    if strategy not in _STRATEGIES:
        raise weights.unsupported("strategy", strategy, ", ".join(_STRATEGIES), next=_NEXT)
    return bits, Sharing(1 if strategy == "channel" else None, None)


def _plain_codes(weights: Fields) -> str:
    return "F8_E4M3" if weights.text("type") == "float" else "I8"


def _bits(section: Fields, key: str) -> int:
    bits = section.integer(key)
    if bits not in _BITS:
        raise section.unsupported(key, bits, ", ".join(map(str, _BITS)), next=_NEXT)
    return bits


def _group(section: Fields, key: str = "group_size") -> Sharing:
    size = section.integer(key, minimum=-1)
    if size == 0:
        raise section.refuse(key, "-1 for whole rows, or a whole number from 1")
    return Sharing(1, None if size == -1 else size)


def _block(section: Fields, key: str) -> Sharing:
    given = section.values.get(key)
    if isinstance(given, str) and re.fullmatch(r"\d{1,7}x\d{1,7}", given):  # of compressed-tensors' first versions
        sizes: list[object] = [int(size) for size in given.split("x")]
    else:
        sizes = section.items(key) or []
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size <= 1 << 20 for size in sizes):
        raise section.refuse(key, "two whole numbers from 1")
    rows, cols = cast("list[int]", sizes)
    return Sharing(rows, cols)


_METHODS: Mapping[str, Callable[[Fields], Scheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
}
"""Readers by quant_method; others (bitsandbytes, aqlm, ...) are refused by that name."""
