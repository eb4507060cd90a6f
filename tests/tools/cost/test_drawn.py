"""Networks that are drawn: what plans say that workers communicate is what their programs do."""

import pytest
from drawn import drawn
from foreseen import check_foreseen


@pytest.mark.parametrize("seed", range(24))
def test_plans_foresee_every_operation_of_drawn_networks(seed: int) -> None:
    """In order, with partners, tags, lengths and dtypes, on 2 to 8 workers."""
    check_foreseen(*drawn(seed))
