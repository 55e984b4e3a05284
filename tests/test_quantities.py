import math

import pytest

from placewise.errors import InvalidInput
from placewise.quantities import format_bytes, format_change, format_seconds, format_share, parse_quantity


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("24GiB", "bytes", 24 * 1024**3),
        ("24 gib", "bytes", 24 * 1024**3),
        ("1.5MB", "bytes", 1.5e6),
        (" 7 ", "bytes", 7.0),
        ("1e9", "bytes", 1e9),
        (".5KiB", "bytes", 512.0),
        (4096, "bytes", 4096.0),
        ("inf", "bytes", math.inf),
        ("16GB/s", "bytes per second", 16e9),
        ("16GB", "bytes per second", 16e9),
        ("1GiB/s", "bytes per second", 1024.0**3),
        ("140TFLOPS", "FLOP per second", 140e12),
        ("2.5 GFLOP/s", "FLOP per second", 2.5e9),
        ("5us", "seconds", 5e-6),
        ("5µs", "seconds", 5e-6),  # the micro sign
        ("5μs", "seconds", 5e-6),  # the Greek letter
        ("2m", "seconds", 120.0),
        ("1h", "seconds", 3600.0),
        (0, "seconds", 0.0),
    ],
)
def test_parse(text, dimension, value):
    assert parse_quantity(text, dimension) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "dimension", "message"),
    [
        ("lots", "bytes", "'lots' is not a number of bytes; write it like '24GiB'"),
        ("24GiB/s", "bytes", "write it like '24GiB'"),
        ("5us", "bytes per second", "write it like '16GB/s'"),
        ("1 2", "seconds", "write it like '30s'"),
        ("", "FLOP per second", "write it like '10TFLOPS'"),
        (True, "bytes", "True is not a number of bytes"),
        (None, "bytes", "None is not a number of bytes"),
        ("-5s", "seconds", "zero or more"),
        (-5, "seconds", "zero or more"),
        (math.nan, "seconds", "zero or more"),
        (10**400, "bytes", "too large: it must be at most 1e\\+24"),
        pytest.param(10**5000, "bytes", "too large: it must be at most 1e\\+24", id="many digits"),
        ("1e20TB", "bytes", "too large for a number of bytes: it must be at most 1e\\+24"),
        ("1e999", "bytes", "too large"),
        (1e300, "seconds", "too large for a number of seconds"),
    ],
)
def test_parse_errors(text, dimension, message):
    with pytest.raises(InvalidInput, match=message):
        parse_quantity(text, dimension)


def test_a_long_text_is_refused_at_once_and_in_short():
    with pytest.raises(InvalidInput) as caught:
        parse_quantity("1" * 100_000 + " x y", "bytes")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1.00 KiB"),
        (9.999 * 1024, "10.0 KiB"),
        (24 * 1024**3, "24.0 GiB"),
        (22.36 * 1024**3, "22.4 GiB"),
        (28.25 * 1024**2, "28.3 MiB"),  # as a browser rounds
        (5000 * 1024**4, "5000 TiB"),
        (1e24, "9.09e+11 TiB"),
        (math.inf, "unlimited"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1.0, "1.00 s"),
        (0.99949, "999 ms"),
        (0.9996, "1.00 s"),
        (3.184e-3, "3.18 ms"),
        (99.96e-3, "100 ms"),
        (5e-6, "5.00 µs"),
        (2e-10, "0.200 ns"),
        (3600.0, "3600 s"),
        (1e44, "1e+44 s"),
        (1e-30, "1e-21 ns"),
        (math.inf, "-"),
        (math.nan, "-"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0%"),
        (1e-12, "<0.1%"),
        (5e-4, "0.1%"),
        (0.042, "4.2%"),
        (0.3125, "31.3%"),  # as a browser rounds
        (0.42, "42.0%"),
        (0.99951, "100%"),
        (1.0, "100%"),
        (1.5, "150.0%"),
        (math.nan, "-"),
    ],
)
def test_format_share(share, text):
    assert format_share(share) == text


@pytest.mark.parametrize(
    ("value", "before", "text"),
    [
        (1.2891, 1.0, "+28.9%"),
        (0.705, 1.0, "-29.5%"),
        (1.0 + 1e-12, 1.0, "0%"),
        (1.0001, 1.0, "<0.1%"),
        (5.0, 0.0, "0%"),
        (1234.0, 1.0, "x 1.23e+03"),
        (math.inf, 1.0, "x inf"),
    ],
)
def test_format_change(value, before, text):
    assert format_change(value, before) == text
