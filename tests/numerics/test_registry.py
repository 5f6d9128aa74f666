"""A look-up in a table helps after a miss."""

import pytest

from quantizer.rows import lookup


@pytest.mark.parametrize(
    ("name", "hint"), [("frist", 'did you mean "first"'), ("zebra", "known are first, second.")]
)
def test_a_miss_lists_the_names(name, hint):
    with pytest.raises(ValueError, match=hint):
        lookup({"first": 1, "second": 2}, name, "place")
