"""Names of samplers and their numbers."""

import pytest

from cluster.sampler_names import sampler_name, sampler_number


@pytest.mark.parametrize("number", [0, 7, 1234])
def test_a_name_leads_back_to_its_number(number):
    assert sampler_number(sampler_name(number)) == number


@pytest.mark.parametrize(
    "name", ["", "sampler-", "sampler-x", "sampler--1", "7", "evaluator-7", "sampler-0, sampler-2"]
)
def test_other_names_have_no_number(name):
    assert sampler_number(name) == -1
    assert not any(digit in sampler_name(-1) for digit in "0123456789")
