"""Stop strings: found wherever tokens cut them, never shown before they are ruled out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.models.fake_model import PIECES, FakeRunner, expected_tokens, make_engine, run_all
from onewave.engine.params import SamplingParams
from onewave.engine.request import Reader
from onewave.engine.text.stop_strings import find_stop, num_held_back
from onewave.ops.sampling import stream_key

PROMPT = [5, 9, 33]


def test_the_match_that_is_completed_first_wins() -> None:
    assert find_stop("hello world", ["world", "hello"], 0) == (0, "hello")
    assert find_stop("abcde", ["abcde", "bcd"], 0) == (1, "bcd")
    assert find_stop("abc", ["bc", "abc"], 0) == (0, "abc")
    assert find_stop("abc", ["x"], 0) is None


def test_a_match_must_end_in_the_new_text_but_may_begin_before_it() -> None:
    assert find_stop("xaby", ["ab"], 3) is None
    assert find_stop("xaby", ["ab"], 2) == (1, "ab")
    assert find_stop("abab", ["ab"], 2) == (2, "ab")


def test_the_longest_possible_beginning_of_a_stop_is_held_back() -> None:
    assert num_held_back("aab", ["abc"]) == 2
    assert num_held_back("aab", ["bx", "aabc", "abc"]) == 3
    assert num_held_back("abc", ["abc"]) == 0
    assert num_held_back("", ["abc"]) == 0


@settings(max_examples=150)
@given(
    st.lists(st.text("abcx ", min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(0, 10**6),
    st.sampled_from([0, 1]),
    st.sampled_from([0, 3]),
    st.booleans(),
)
def test_a_stream_never_takes_text_back_and_ends_where_the_whole_text_says(
    stops: list[str], seed: int, run_ahead: int, min_tokens: int, include: bool
) -> None:
    params = SamplingParams(
        stop=stops, seed=seed, max_tokens=25, min_tokens=min_tokens, ignore_eos=True, include_stop_str_in_output=include
    )
    engine = make_engine(FakeRunner(run_ahead=run_ahead))
    streamed = engine.add(None, PROMPT, params, Reader(streaming=True))
    quiet = engine.add(None, PROMPT, params)
    shown = [streamed.output().outputs[0]]
    while engine.has_work:
        engine.step()
        shown.append(streamed.output().outputs[0])
    last = shown[-1]
    assert "".join(output.delta for output in shown) == last.text
    assert all(last.text.startswith(output.text) for output in shown)
    assert quiet.output().outputs[0].text == last.text
    assert quiet.output().outputs[0].token_ids == last.token_ids

    tokens = expected_tokens(PROMPT, params, stream_key(0, seed, 0))
    assert tokens[: len(last.token_ids)] == last.token_ids
    whole = "".join(PIECES[token] for token in tokens)
    if last.finish_reason == "stop":
        stop = last.stop_reason
        assert stop in stops
        assert len(last.token_ids) > min_tokens
        found = last.text if include else last.text + str(stop)
        assert whole.startswith(found)
        assert found.endswith(str(stop))
        if min_tokens == 0:
            # Nothing was completed before it.
            assert not any(other in found[:-1] for other in stops)
    else:
        assert last.finish_reason == "length"
        assert last.text == whole
        if min_tokens == 0:
            assert not any(stop in whole for stop in stops)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_stop_string_in_the_middle_of_a_token_cuts_the_token(run_ahead: int) -> None:
    runner = FakeRunner(run_ahead=run_ahead)
    engine = make_engine(runner)
    piece = PIECES.index("aab")
    params = SamplingParams(stop="ab", temperature=0, logit_bias={piece: 100.0})
    request = engine.add(None, PROMPT, params)
    run_all(engine)
    output = request.output().outputs[0]
    assert (output.text, output.token_ids, output.stop_reason) == ("a", [piece], "ab")


@settings(max_examples=100)
@given(st.lists(st.text("abcx ", min_size=1, max_size=6), min_size=1, max_size=3), st.integers(0, 10**6), st.booleans())
def test_deltas_hold_token_ids_back_with_their_text_and_a_stop_string_takes_both(
    stops: list[str], seed: int, include: bool
) -> None:
    params = SamplingParams(
        stop=stops,
        seed=seed,
        max_tokens=25,
        ignore_eos=True,
        include_stop_str_in_output=include,
        logprobs=0,
        logit_bias=dict.fromkeys((t for t, piece in enumerate(PIECES) if "x" in piece), -100.0),
    )
    engine = make_engine(FakeRunner())
    request = engine.add(None, PROMPT, params, Reader(streaming=True))
    text, ids, logprobs = "", list[int](), list[int]()
    while engine.has_work:
        engine.step()
        output = request.output(delta=True).outputs[0]
        text, ids = text + output.text, ids + output.token_ids
        logprobs += [token for entry in output.logprobs or [] for token in entry]
        given_text = "".join(PIECES[token] for token in ids)
        if not output.finished():
            assert text.startswith(given_text)
    whole = request.output().outputs[0]
    assert (text, logprobs) == (whole.text, ids)
    assert whole.token_ids[: len(ids)] == ids
    if whole.finish_reason == "length" or include:
        assert ids == whole.token_ids
    else:
        assert given_text.startswith(text)
        assert not ids or len(given_text) - len(PIECES[ids[-1]]) < len(text)


# Pieces without "x", which the detokenizer shows later than the tokens it belongs to.
SPECIAL = {token for token in range(3, len(PIECES), 4) if "x" not in PIECES[token]}


@settings(max_examples=150)
@given(
    st.lists(st.text("abc ", min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(0, 10**6),
    st.booleans(),
    st.booleans(),
)
def test_stop_strings_are_found_in_the_text_with_control_tokens_whether_these_are_shown_or_not(
    stops: list[str], seed: int, skip: bool, include: bool
) -> None:
    params = SamplingParams(
        stop=stops,
        seed=seed,
        max_tokens=25,
        ignore_eos=True,
        skip_special_tokens=skip,
        include_stop_str_in_output=include,
        logit_bias=dict.fromkeys((t for t, piece in enumerate(PIECES) if "x" in piece), -100.0),
    )
    engine = make_engine(FakeRunner(), special=SPECIAL)
    streamed = engine.add(None, PROMPT, params, Reader(streaming=True))
    shown = [streamed.output().outputs[0]]
    while engine.has_work:
        engine.step()
        shown.append(streamed.output().outputs[0])
    last = shown[-1]
    assert "".join(output.delta for output in shown) == last.text
    assert all(last.text.startswith(output.text) for output in shown)

    tokens = expected_tokens(PROMPT, params, stream_key(0, seed, 0))
    letters = [(letter, token in SPECIAL and skip) for token in tokens for letter in PIECES[token]]
    whole = "".join(letter for letter, _ in letters)
    ends = [end for end in range(len(whole) + 1) if whole[:end].endswith(tuple(stops))]
    assert last.finish_reason == ("stop" if ends else "length")
    end = len(whole)
    if ends:
        stop = max((stop for stop in stops if whole[: ends[0]].endswith(stop)), key=len)
        assert last.stop_reason == stop
        end = ends[0] if include else ends[0] - len(stop)
    assert last.text == "".join(letter for letter, hidden in letters[:end] if not hidden)
