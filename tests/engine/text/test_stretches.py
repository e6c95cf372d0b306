"""Texts that were encoded lately are not encoded again, and others go."""

from typing import Any

import pytest

from kit.models.chat_templates import CHATML, with_template
from onewave.engine.text import stretches
from onewave.engine.text.stretches import KeptStretches

TURN = "Tell me of <|im_end|> and all that. " * 10


def test_a_conversations_earlier_turns_are_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, fresh, encoded = with_template(CHATML), with_template(CHATML), list[str]()
    plain = tokenizer.encode_plain

    def noting(text: str, **given: Any) -> list[int]:
        encoded.append(text)
        return plain(text, **given)

    monkeypatch.setattr(tokenizer, "encode_plain", noting)
    talk = [{"role": "user", "content": f"{TURN}{i}"} for i in range(4)]
    for turns, new in ((2, 2), (3, 1), (4, 1), (4, 0)):
        encoded.clear()
        assert tokenizer.encode_chat(talk[:turns]) == fresh.encode_chat(talk[:turns])
        assert sum(TURN in text for text in encoded) == new


def test_a_stretch_is_kept_with_what_its_ids_depend_on_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "_MAX_CHARACTERS", 1000)
    asked = list[tuple[str, bool]]()

    def encode(text: str, at_start: bool, tags: frozenset[int]) -> list[int]:
        asked.append((text[0], at_start))
        return [ord(text[0]), int(at_start), *tags]

    kept = KeptStretches(encode)
    a, b, c = (letter * 400 for letter in "abc")
    for text, at_start in ((a, True), (a, False), (a, True), (b, True), (a, True), (c, True), (b, True), (a, True)):
        assert kept.ids(text, at_start=at_start, tags=frozenset()) == [ord(text[0]), int(at_start)]
    assert asked == [("a", True), ("a", False), ("b", True), ("c", True), ("b", True), ("a", True)]
    for text in ("short", "l" * 1001):
        del asked[:]
        assert kept.ids(text, at_start=True, tags=frozenset()) == kept.ids(text, at_start=True, tags=frozenset())
        assert len(asked) == 2
