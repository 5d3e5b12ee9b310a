"""The examples in the docstrings of what a user imports."""

import doctest

import pytest
import torch

import htree_ops

NAMES = [
    name
    for name in htree_ops.__all__
    if callable(value := getattr(htree_ops, name))
    and not (isinstance(value, type) and issubclass(value, Exception))
]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example_that_runs(name):
    doc = getattr(htree_ops, name).__doc__
    known = {"torch": torch} | {name: getattr(htree_ops, name) for name in NAMES}
    example = doctest.DocTestParser().get_doctest(doc, known, name, None, None)
    assert example.examples, "no example"
    torch.manual_seed(0)
    report = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=report.append)
    assert result.failed == 0, "".join(report)
