"""What is logged while a Python function runs names no option of the shell."""

from collections.abc import Iterator

import pytest
from support.shell_words import options_in


@pytest.fixture(autouse=True)
def no_options_in_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    for record in caplog.get_records("call"):
        if record.name.startswith("quantizer."):
            assert not options_in(record.getMessage())
