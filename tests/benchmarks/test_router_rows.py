"""Rows of the router: the tokens it pools."""

from router import POOL_SIZE, boundary_tokens


def test_boundary_tokens_are_the_first_and_the_last():
    tokens = boundary_tokens(512).tolist()
    assert tokens == [*range(POOL_SIZE), *range(512 - POOL_SIZE, 512)]
