"""A registry refuses a second owner of a name and helps after a miss."""

import pytest

from quantizer.numerics.registry import lookup, register_in


def test_a_name_is_registered_once():
    registry = {}
    register_in(registry, "first")("entry")
    with pytest.raises(ValueError, match="\"first\" is registered already, by 'entry'"):
        register_in(registry, "first")("another")
    assert registry == {"first": "entry"}


@pytest.mark.parametrize(
    ("name", "hint"), [("frist", 'did you mean "first"'), ("zebra", "known are first, second.")]
)
def test_a_miss_lists_the_names(name, hint):
    with pytest.raises(ValueError, match=hint):
        lookup({"first": 1, "second": 2}, name, "place")
