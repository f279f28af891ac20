"""How a report words numbers, and what it makes of texts from data."""

import pytest

from eaglefeed.ops.wording import count, duration, human_bytes, percent, plain, rate, roughly, significant, timestamp


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        (count(1234567), "1,234,567"),
        (human_bytes(0), "0 B"),
        (human_bytes(1536), "1.5 KiB"),
        (human_bytes(64 * 2**30), "64.0 GiB"),
        (human_bytes(5 * 2**40), "5.0 TiB"),
        (percent(0), "0 %"),
        (percent(0.004), "< 1 %"),
        (percent(0.5), "50 %"),
        (percent(0.999), "> 99 %"),
        (percent(1), "100 %"),
        (significant(0.0123456), "0.0123"),
        (significant(1234.5), "1,234"),
        (significant(2.0), "2.00"),
        (significant(float("nan")), "not finite"),
        (significant(1e200), "1.00e+200"),
        (rate(2.5, "samples"), "2.50 samples/s"),
        (duration(0.44), "0.4 s"),
        (duration(59), "59 s"),
        (duration(61), "1 min 1 s"),
        (duration(7384), "2 h 3 min"),
        (duration(200_000), "2 d 7 h"),
        (duration(7200), "2 h"),
        (roughly(1691), "28 min"),
        (roughly(64), "1 min"),
        (roughly(3), "10 s"),
        (timestamp(0), "1970-01-01 00:00:00"),
    ],
)
def test_numbers_are_told_exactly_and_briefly(told: str, wanted: str) -> None:
    assert told == wanted


def test_what_does_not_print_or_turns_its_surroundings_is_spelled_out() -> None:
    assert plain("a‮b\n\x1b[31mc​") == r"a\u202eb\n\x1b[31mc\u200b"
    assert plain("naïve 日本語") == "naïve 日本語"


def test_a_long_text_is_cut_and_says_so() -> None:
    assert plain("x" * 1000, 10) == "xxxxxxxxxx… (1,000 characters)"
