"""An answer's text, as it grows."""

from onewave.engine.text.growing import _MAX_NEWEST, GrowingText


def test_a_text_of_any_length_grows_without_being_copied_and_is_read_from_anywhere():
    text, plain = GrowingText(), ""
    for number in range(1500):
        piece = f"{number} is a number, "[: number % 20]
        text.add(piece)
        plain += piece
        assert len(text._newest[1]) < _MAX_NEWEST
        if number % 25 == 0:
            end = len(plain)
            for begin in (0, end // 3, max(0, end - 20)):
                assert text.between(begin, end - 1) == plain[begin : max(end - 1, 0)]
            assert (str(text), len(text)) == (plain, end)
    for length in (len(plain) - 3, 5000, 10):
        text.cut(length)
        assert (str(text), len(text), text.between(3, length)) == (plain[:length], length, plain[3:length])
