"""Stop strings in streamed text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frink_numba.errors import SettingError
from frink_numba.host.stop_text import StopText


def feed(stops, parts):
    stop = StopText(stops)
    shown = [stop.push(part) for part in parts]
    if stop.found is None:
        shown.append(stop.flush())
    return shown, stop.found


def test_a_stop_string_over_several_pieces_is_never_shown():
    assert feed(["###"], ["a#", "#", "b##", "#c"]) == (["a", "", "##b", ""], "###")


def test_what_only_looked_like_a_stop_string_is_shown_in_the_end():
    assert feed(["###"], ["a##"]) == (["a", "##"], None)


def test_of_several_the_one_that_is_complete_first_ends_the_text():
    assert feed(["END", "\n\n"], ["x\n\nEND"]) == (["x"], "\n\n")
    assert feed(["b", "abc"], ["ab", "c"]) == (["a", ""], "b")
    assert feed(["b", "abc"], ["abc"]) == (["a"], "b")
    assert feed(["abc", "bc"], ["abc"]) == ([""], "abc")


def test_without_stop_strings_text_passes_at_once():
    assert feed([], ["a", "", "b"]) == (["a", "", "b", ""], None)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=3), max_size=12),
)
def test_any_split_of_a_text_shows_the_text_up_to_the_first_stop_string(stops, parts):
    """However the text comes, as much is shown as can be, and no more."""
    stop, whole, shown = StopText(stops), "", ""
    for part in parts:
        whole += part
        shown += stop.push(part)
        if stop.found is None:
            assert not any(text in whole for text in stops)
        else:
            first = min(end for end in range(len(whole) + 1) if any(whole[:end].endswith(text) for text in stops))
            assert whole[:first] == shown + stop.found
            assert not any(whole[:first].endswith(text) and len(text) > len(stop.found) for text in stops)
            return
        tails = [whole[i:] for i in range(len(whole) + 1)]
        possible = max(len(tail) for tail in tails if not tail or any(text.startswith(tail) for text in stops))
        assert shown == whole[: len(whole) - possible]
    assert shown + stop.flush() == whole


@pytest.mark.parametrize("bad", ["END", ["a", ""], [1], [None], 5, b"END", None])
def test_stop_strings_that_are_none_are_refused(bad):
    with pytest.raises(SettingError, match="stop="):
        StopText(bad)
