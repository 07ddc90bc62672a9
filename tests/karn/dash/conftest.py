"""A browser for the tests of the page."""

import pytest

from tests.support.browser import Visits, launched


@pytest.fixture(scope="module")
def browser():
    yield from launched()


@pytest.fixture
def visits(browser):
    """Open pages; afterwards fail on any console message, dialog or request to another place."""
    pages = Visits(browser)
    yield pages
    pages.close()
    assert pages.trouble == []
