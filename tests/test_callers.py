"""Numbers of the modules that call attention."""

from torch import nn

from distca.ranks import callers


def test_a_module_has_its_number_in_the_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.ReLU()))
    assert callers.number_of(model[1][1]) == 4
    assert callers.number_of(model[0]) == 1
    assert callers.number_of(model) == callers.UNKNOWN


def test_incomplete_modules_are_left_out():
    half = nn.Linear.__new__(nn.Linear)  # as during its construction or collection
    broken = nn.Sequential(nn.ReLU())
    broken._modules["1"] = half
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    assert callers.number_of(model[1]) == 2
