import pickle

import pytest

from colo import errors
from colo.errors import BudgetError, ColoError, EngineLost, PhaseError, StaleWeights, TransferError, Unsupported


@pytest.mark.parametrize("kind", [PhaseError, StaleWeights, TransferError, EngineLost, Unsupported])
def test_every_error_is_a_colo_error_and_says_what_it_was_given(kind):
    with pytest.raises(ColoError, match="3 bytes") as caught:
        raise kind("3 bytes did not arrive")
    assert type(caught.value) is kind


def test_no_error_can_be_mistaken_for_a_wrong_argument():
    kinds = [member for member in vars(errors).values() if isinstance(member, type)]
    assert kinds
    assert not any(issubclass(kind, (ValueError, TypeError, RuntimeError)) for kind in kinds)


def test_the_tree_in_the_docstring_is_the_tree():
    lines = [line for line in errors.__doc__.splitlines() if "+-- " in line]
    assert {line.split("+-- ")[1].split()[0] for line in lines} == {k.__name__ for k in ColoError.__subclasses__()}


@pytest.mark.parametrize(("needed", "free", "missing"), [(10, 4, 6), (10, 10, 0), (4, 10, 0), (10, -5, 15)])
def test_a_budget_error_says_how_many_bytes_are_missing(needed, free, missing):
    error = BudgetError("too much", needed_bytes=needed, free_bytes=free)
    assert (str(error), error.needed_bytes, error.free_bytes) == ("too much", needed, free)
    assert error.missing_bytes == missing


@pytest.mark.parametrize("kind", ColoError.__subclasses__())
def test_an_error_of_another_process_arrives_as_it_was(kind):
    sizes = {"needed_bytes": 10, "free_bytes": 4} if kind is BudgetError else {}
    error = kind("3 bytes did not arrive", **sizes)
    error.add_note("ask for less")
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), found.__notes__) == (kind, str(error), ["ask for less"])
    assert vars(found) == vars(error)
