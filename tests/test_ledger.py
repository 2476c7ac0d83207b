"""The ledger: sums per model, hard stops before a call."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from modpo.config import Budget
from modpo.errors import BudgetError
from modpo.ledger import Ledger, Usage
from modpo.records import Call


def a_call(model: str = "m", dollars: float | None = 0.25) -> Call:
    return Call(
        module="plan", occurrence=0, model=model, input_tokens=10, output_tokens=3, dollars=dollars, seconds=0.5
    )


def test_calls_add_up_per_model_on_top_of_earlier_sittings() -> None:
    ledger = Ledger(used=[Usage(model="m", calls=1, input_tokens=1, output_tokens=1, dollars=1.0, seconds=1.0)])
    for call in (a_call(), a_call(), a_call("free", None)):
        ledger.add(call)
    assert ledger.totals() == [
        Usage(model="free", calls=1, input_tokens=10, output_tokens=3, dollars=0.0, seconds=0.5),
        Usage(model="m", calls=3, input_tokens=21, output_tokens=7, dollars=1.5, seconds=2.0),
    ]


def test_no_count_is_lost_between_threads() -> None:
    ledger = Ledger()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: ledger.add(a_call(f"m{number % 2}")), range(2000)))
    assert [usage.calls for usage in ledger.totals()] == [1000, 1000]
    assert [usage.output_tokens for usage in ledger.totals()] == [3000, 3000]


def test_the_call_that_would_pass_a_limit_is_refused() -> None:
    ledger = Ledger(Budget(tokens=26, dollars=1.0))
    ledger.check(tokens=26, dollars=1.0)
    ledger.add(a_call())
    ledger.check(tokens=13, dollars=0.75)
    with pytest.raises(BudgetError, match="budget of 26 tokens is spent: 13 used and up to 14 needed"):
        ledger.check(tokens=14)
    with pytest.raises(BudgetError, match=r"budget of 1 dollars is spent: 0\.25 used and up to 0\.8 needed"):
        ledger.check(dollars=0.8)
    ledger.add(a_call())
    with pytest.raises(BudgetError, match="26 used"):
        ledger.check()


def test_time_stops_with_earlier_sittings_counted() -> None:
    now = [100.0]
    ledger = Ledger(Budget(seconds=60.0), elapsed=50.0, clock=lambda: now[0])
    now[0] = 109.0
    assert ledger.elapsed == 59.0
    ledger.check()
    now[0] = 110.0
    with pytest.raises(BudgetError, match="60 seconds"):
        ledger.check()


def test_no_budget_never_stops() -> None:
    ledger = Ledger()
    ledger.add(a_call(dollars=1e9))
    ledger.check(tokens=10**12, dollars=1e12)


def test_calls_under_way_hold_their_share() -> None:
    ledger = Ledger(Budget(dollars=1.0))
    with ledger.reserve(dollars=0.7):
        with pytest.raises(BudgetError, match=r"0 used, 0\.7 held for calls under way and up to 0\.4 needed"):
            ledger.check(dollars=0.4)
        with ledger.reserve(dollars=0.3):
            pass
    ledger.check(dollars=1.0)


def test_a_policys_calls_are_counted_per_adapter() -> None:
    ledger = Ledger()
    for version in (1, 2):
        name = f"modpo/tiny/plan@v{version}#run"
        ledger.add(Call(module="plan", occurrence=0, model=name, prompt_ids=(1, 2), input_tokens=2, output_tokens=1))
    assert [(usage.model, usage.calls) for usage in ledger.totals()] == [("modpo/tiny/plan", 2)]
